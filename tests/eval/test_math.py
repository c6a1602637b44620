"""MATH from local files: prompts, the answer in a solution, and its judge."""

from __future__ import annotations

import json
import pathlib
import sys

import pytest

from polestar_jax.errors import InputError, RunError
from polestar_jax.eval import math_judge
from polestar_jax.eval.math import EXAMPLES, TASK, final_answer
from polestar_jax.eval.task import Item, cut

ROWS = [
    {"problem": "What is $6\\cdot 7$?", "solution": "It is $\\boxed{42}$.", "type": "Prealgebra", "level": "Level 1"},
    {
        "problem": "Solve $x^2=9$.",
        "solution": "So \\boxed{x=1} is no root, and $x\\in\\boxed{\\{-3,3\\}}$.",
        "subject": "Algebra",
    },
    {"problem": "Halve $x+1$.", "solution": "We divide.", "answer": "\\frac{x+1}{2}", "unique_id": "test/7"},
]


def judged() -> None:
    pytest.importorskip("math_verify", reason="math-verify (extra eval) is not installed")


def data(tmp_path: pathlib.Path, rows: list[dict] = ROWS) -> pathlib.Path:
    path = tmp_path / "math.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def right(target: str, text: str) -> float:
    return TASK.score(Item(id="1", prompt="", target=target), cut(text, TASK.stop))["math_verify"]


def test_prompt(tmp_path):
    judged()
    items = TASK.items(data(tmp_path), {"shots": 0})
    assert [item.prompt for item in items] == [f"Problem:\n{row['problem']}\n\nSolution:" for row in ROWS]
    assert [item.target for item in items] == ["42", "\\{-3,3\\}", "\\frac{x+1}{2}"]
    assert [item.subset for item in items] == ["Prealgebra", "Algebra", ""]
    assert [item.id for item in items] == ["1", "2", "test/7"]
    shot = TASK.items(data(tmp_path), {})[0].prompt
    assert shot.count("Problem:\n") == shot.count("\n\nSolution:") == 5 == TASK.shots + 1
    assert shot.endswith(items[0].prompt) and "Final Answer: The final answer is $22$.\n\nProblem:" in shot


def test_b45_right_answers_score_one_and_wrong_ones_zero(tmp_path):
    judged()
    for item in TASK.items(data(tmp_path), {}):
        assert TASK.score(item, f"So \\boxed{{{item.target}}}.") == {"math_verify": 1.0, "answered": 1.0}
        assert TASK.score(item, "So \\boxed{17}.") == {"math_verify": 0.0, "answered": 1.0}
        assert TASK.score(item, TASK.canonical(item))["math_verify"] == 1.0
        assert TASK.score(item, "") == {"math_verify": 0.0, "answered": 0.0}


def test_the_examples_are_right():
    """Each answer is what its solution boxes, and is worked out here another way."""
    for _, solution, answer in EXAMPLES:
        assert final_answer(solution) == answer
    same = sum(a == b for n, a in enumerate("rrrrbbbbbb") for b in "rrrrbbbbbb"[:n])
    inside = [x for x in range(-100, 100) if (x / 10) ** 2 - 5 * x / 10 + 4 <= 1e-9]
    assert EXAMPLES[0][2] == f"{4 + (10 - 4) // (3 - 1) * (7 - 1)}"
    assert EXAMPLES[1][2] == f"{3**50 % 7}"
    assert same * 15 == 45 * 7 and EXAMPLES[2][2] == "\\frac{7}{15}"
    assert EXAMPLES[3][2] == f"[{inside[0] // 10},{inside[-1] // 10}]"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Final Answer: The final answer is $22$. I hope it is correct.", "22"),
        ("**The final answer is: 22**", "22"),
        ("The final answer is\n\\[\n\\frac{1}\n{2}\n\\]\nand so on", "\\frac{1}\n{2}"),
        ("The final answer is $$x=5.5$$.", "x=5.5"),
        ("The final answer is $5.5$. We are done.", "5.5"),
        ("the final answer is \\(3\\).\n\nMore text with 4.", "3"),
        ("The final answer is $\\boxed{3}$.", "3"),
        ("\\boxed{1}? No. The final answer is $2$.", "2"),
        ("The final answer is $2$. No: \\boxed{1}", "1"),
        ("\\boxed{\\frac{7}{15}} or \\fbox{\\{1,\\text{a}b}\\}}", "\\{1,\\text{a}b"),
        ("\\boxed {4}", "4"),
        ("So it is $\\boxed 5$.", "5"),
        ("\\boxed{1} or rather $\\boxed \\frac{1}{2}$. Done.", "\\frac{1}{2}"),
        ("We get \\boxed 7. Done", "7"),
        ("\\boxed{", None),
        ("\\boxed{}", None),
        ("The final answer is", None),
        ("It is 5.", None),
    ],
)
def test_the_answer_of_a_solution(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("target", "answer", "equal"),
    [
        ("\\frac{1}{2}", "0.5", True),
        ("\\frac12", "1/2", True),
        ("x^2+2x+1", "(x+1)^2", True),
        ("5\\text{ cm}", "5", True),
        ("11,\\!111,\\!100", "11111100", True),
        ("3,5,7", "7,5,3", True),
        ("\\text{Evelyn}", "Evelyn", True),
        ("[2,5)", "[2, 5)", True),
        ("[2,5)", "(2,5)", False),
        ("(1,2)", "(2,1)", False),
        ("\\text{even}", "odd", False),
        ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "\\begin{pmatrix} 2 \\\\ 1 \\end{pmatrix}", False),
        ("\\sqrt{2}", "1.414", False),
        ("5", "5}\\boxed{6", False),
        ("5", "}{", False),
        ("5", "\\int_", False),
    ],
)
def test_equal_expressions_are_the_same(target, answer, equal):
    judged()
    assert right(target, f"The final answer is ${answer}$") == equal


def test_b48_judged_without_network(tmp_path, monkeypatch):
    judged()

    def refuse(*_, **__):
        raise AssertionError("a socket was made")

    monkeypatch.setattr("socket.socket", refuse)
    answers = ["\\boxed{42}", "The final answer is $3$", "The final answer is $(x+1)/2$. Problem: more"]
    items = TASK.items(data(tmp_path), {})
    assert [
        TASK.score(item, cut(text, TASK.stop))["math_verify"] for item, text in zip(items, answers, strict=True)
    ] == [1, 0, 1]


def test_b48_a_missing_judge_is_told_before_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(math_judge, "PACKAGE", "no_such_package")
    for call in (lambda: TASK.items(data(tmp_path), {}), lambda: math_judge.same("1", "2")):
        with pytest.raises(InputError, match=r"math-verify.*pip install 'polestar-jax\[eval\]'"):
            call()


@pytest.mark.parametrize("verdict", [True, False])
def test_b45_a_judge_that_does_not_work_is_told_before_the_run(tmp_path, monkeypatch, verdict):
    judged()
    monkeypatch.setattr(math_judge, "same", lambda *_: verdict)
    with pytest.raises(RunError, match="math-verify does not work here"):
        TASK.items(data(tmp_path), {})


def test_an_endless_comparison_counts_as_wrong_and_the_next_is_judged(monkeypatch):
    judged()
    assert math_judge.same("2", "1+1")
    first = math_judge._process
    monkeypatch.setattr(math_judge, "WALL_SECONDS", 0.5)
    assert not math_judge.same("9^{9^{9^9}}", "5")
    assert first.poll() is not None
    monkeypatch.undo()
    assert math_judge.same("2", "1+1")
    assert math_judge._process is not first


def test_a_judge_that_was_killed_is_started_anew():
    judged()
    assert math_judge.same("2", "1+1")
    math_judge._process.kill()
    math_judge._process.wait()
    assert math_judge.same("2", "1+1")


def test_no_late_reply_is_taken_for_the_next_answer(monkeypatch):
    """A comparison left by Ctrl-C leaves its process with a reply to come."""
    judged()
    assert math_judge.same("2", "1+1")

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(math_judge, "_line", interrupt)
    with pytest.raises(KeyboardInterrupt):
        math_judge.same("2", "2")
    monkeypatch.undo()
    assert not math_judge.same("2", "3")


def test_the_standard_library_is_not_hidden():
    """The package has a module called math; the worker runs from its directory."""
    import math

    judged()
    assert math.sqrt(4) == 2 and math is sys.modules["math"] is not sys.modules["polestar_jax.eval.math"]
    assert math_judge.same("2", "\\sqrt{4}")


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([{"problem": "a"}], {}, "line 1: math needs the field solution, a text"),
        ([{"problem": "a", "solution": "It is 5."}], {}, r"the solution of row 1 has no \boxed answer"),
        (ROWS, {"shots": 5}, "shots=5 is not accepted: a whole number in 0..4"),
        (ROWS, {"seed": 5}, "math has no option seed; accepted: shots"),
    ],
)
def test_what_does_not_fit_is_one_clear_line(tmp_path, rows, options, message):
    judged()
    with pytest.raises(InputError) as error:
        TASK.items(data(tmp_path, rows), options)
    assert message in str(error.value) and "\n" not in str(error.value)
