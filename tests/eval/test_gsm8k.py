"""GSM8K from local files: prompts, drawn examples, both ways to read an answer, and files that do not fit."""

from __future__ import annotations

import gzip
import json
import pathlib

import pytest

from polestar_jax.errors import InputError
from polestar_jax.eval.gsm8k import TASK
from polestar_jax.eval.task import Item, cut

ROWS = [
    {"question": "Mia has 3 pens and buys 4. How many?", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"},
    {"question": "A car costs $1,200 and a bike $18. Together?", "answer": "1200 + 18 = 1218\n#### 1,218"},
    {"question": "It was 3 degrees and fell by 5. How cold is it?", "answer": "3 - 5 = -2\n#### -2"},
]
TRAIN = [{"question": f"What is {n} + {n}?", "answer": f"{n} + {n} = {2 * n}\n#### {2 * n}"} for n in range(20)]


def write(path: pathlib.Path, rows: list[dict]) -> pathlib.Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def made(tmp_path: pathlib.Path, **options) -> list[Item]:
    return TASK.items(write(tmp_path / "test.jsonl", ROWS), options)


def scores(item: Item, text: str) -> tuple[float, float]:
    result = TASK.score(item, cut(text, TASK.stop))
    assert list(result) == ["flexible", "strict"]
    return result["flexible"], result["strict"]


def test_prompt_without_examples(tmp_path):
    items = made(tmp_path, shots=0)
    assert [item.id for item in items] == ["1", "2", "3"]
    assert items[0].prompt == "Question: Mia has 3 pens and buys 4. How many?\nAnswer:"
    assert [item.target for item in items] == ["7", "1218", "-2"]


def test_five_examples_are_those_that_lm_eval_draws(tmp_path):
    """The places were taken from lm-eval 0.4.8's own sampler: 20 rows, seed 1234."""
    train = write(tmp_path / "train.jsonl", TRAIN)
    items = made(tmp_path, shots_file=train)
    drawn = [[14, 3, 0, 2, 1], [2, 3, 11, 7, 0], [0, 19, 11, 15, 14]]
    for item, row, places in zip(items, ROWS, drawn, strict=True):
        examples = [f"Question: {TRAIN[n]['question']}\nAnswer: {TRAIN[n]['answer']}\n\n" for n in places]
        assert item.prompt == "".join(examples) + f"Question: {row['question']}\nAnswer:"
    assert made(tmp_path, shots_file=str(train), shots="5", seed=1234) == items
    assert made(tmp_path, shots_file=train, seed=42) != items
    assert made(tmp_path, shots_file=train, shots=2)[0].prompt.count("Question:") == 3


def test_a_question_is_never_its_own_example(tmp_path):
    items = made(tmp_path, shots=2, shots_file=tmp_path / "test.jsonl")
    for item, row in zip(items, ROWS, strict=True):
        assert item.prompt.count(row["question"]) == 1 and item.prompt.count("Question:") == 3


def test_b45_right_answers_score_one_and_wrong_ones_zero(tmp_path):
    for item, row in zip(made(tmp_path, shots=0), ROWS, strict=True):
        assert scores(item, row["answer"]) == (1, 1)
        assert scores(item, row["answer"].partition("####")[0] + "#### 99") == (0, 0)
        assert scores(item, "") == (0, 0)
        assert scores(item, TASK.canonical(item)) == (1, 1)


@pytest.mark.parametrize(
    ("target", "text", "expected"),
    [
        ("18", "So the answer is 18.", (1, 0)),
        ("18", "#### 18", (1, 1)),
        ("18", "#### 18.", (1, 1)),
        ("18", "#### 18 and 7 are left", (0, 1)),  # strict: the first marked; flexible: the last of all
        ("18", "#### 17\n#### 18", (1, 0)),
        ("18", "####18", (1, 0)),
        ("18", "It costs $18", (1, 0)),
        ("1218", "#### 1,218", (1, 1)),
        ("1218", "#### $1,218", (1, 0)),
        ("-2", "minus: -2", (1, 0)),
        ("2", "#### -2", (0, 0)),
        ("18", "18.0", (0, 0)),  # texts are compared
        ("18", "18 of course...", (0, 0)),  # lm-eval's filter takes the dots for the last number
        ("18", "eighteen", (0, 0)),
        ("18", "#### 18\n\nQuestion: What is 3 + 4?\nAnswer: 7\n#### 7", (1, 1)),
        ("18", "#### 18<|im_end|> 5", (1, 1)),
    ],
)
def test_both_filters(target, text, expected):
    assert scores(Item(id="1", prompt="", target=target), text) == expected


def test_b48_no_network_is_needed(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a socket was made")

    monkeypatch.setattr("socket.socket", refuse)
    items = made(tmp_path, shots=2, shots_file=write(tmp_path / "train.jsonl", TRAIN))
    answers = ["#### 7", "#### 1217", "It is -2"]
    assert [scores(item, text) for item, text in zip(items, answers, strict=True)] == [(1, 1), (0, 0), (1, 0)]


def test_packed_file_empty_lines_and_ids(tmp_path):
    lines = [json.dumps(row | {"id": f"row-{n}"}) for n, row in enumerate(ROWS)]
    path = tmp_path / "test.jsonl.gz"
    path.write_bytes(gzip.compress(("\ufeff" + "\n\n".join(lines) + "\n").encode()))
    assert [item.id for item in TASK.items(path, {"shots": 0})] == ["row-0", "row-1", "row-2"]


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (None, {"shots": 0}, "file is missing"),
        ("", {"shots": 0}, "holds no rows"),
        ("{", {"shots": 0}, "line 1: no valid JSON"),
        ("[1]", {"shots": 0}, "line 1: holds a JSON list"),
        ('{"question": "a"}', {"shots": 0}, "line 1: gsm8k needs the field answer, a text"),
        ('{"question": "a", "answer": 7}', {"shots": 0}, "line 1: gsm8k needs the field answer, a text"),
        (
            '{"question": "a", "answer": "seven"}',
            {"shots": 0},
            "answer of row 1 does not end with '#### ' and a number",
        ),
        ('{"question": "a", "answer": "7", "id": 1}\n' * 2, {"shots": 0}, "two rows are called 1"),
        ('{"question": "a", "answer": "7"}', {}, "5 shots need shots_file=F.jsonl"),
        ('{"question": "a", "answer": "7"}', {"shots": -1}, "shots=-1 is not accepted: a whole number in 0..64"),
        ('{"question": "a", "answer": "7"}', {"shots": "many"}, "shots=many is not accepted"),
        ('{"question": "a", "answer": "7"}', {"shots": 0, "seed": "x"}, "seed=x is not accepted"),
        (
            '{"question": "a", "answer": "7"}',
            {"shot": 0},
            "gsm8k has no option shot; accepted: shots, shots_file, seed",
        ),
    ],
)
def test_what_does_not_fit_is_one_clear_line(tmp_path, content, options, message):
    path = tmp_path / "data.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError) as error:
        TASK.items(path, options)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_too_few_examples_and_no_data(tmp_path):
    with pytest.raises(InputError, match="holds 20 rows; shots=21 needs 21"):
        made(tmp_path, shots=21, shots_file=write(tmp_path / "train.jsonl", TRAIN))
    with pytest.raises(InputError, match=r"gsm8k needs --data F\.jsonl"):
        TASK.items(None, {"shots": 0})
    damaged = tmp_path / "damaged.jsonl.gz"
    damaged.write_bytes(b"no gzip")
    with pytest.raises(InputError, match="cannot be read"):
        TASK.items(damaged, {"shots": 0})
