"""The embedded model: its tasks, its training, its weights in the real layout, and that it answers."""

from __future__ import annotations

import json
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polestar_jax import decoders
from polestar_jax.cli import main
from polestar_jax.generation import generate
from polestar_jax.loading import load
from polestar_jax.tiny import DIRECTORY, tasks, vocabulary
from polestar_jax.tiny.train import LONG_CANVASES, SPEC, TIGHT_CANVASES, Recipe, batches, draw_masks


@pytest.fixture(scope="module")
def tiny():
    return load("tiny", dtype="float32")


def test_the_shipped_evaluation_set_is_the_one_the_code_draws():
    assert tasks.load_evaluation_set() == tasks.evaluation_set()
    assert len({e.prompt for e in tasks.evaluation_set()}) == 100 * len(tasks.TASKS)


def test_training_never_sees_an_evaluation_prompt():
    held_out = {e.prompt for e in tasks.evaluation_set()}
    stream = tasks.TrainingExamples(0)
    # Short lists repeat often, so that a leak would show: draw until a quarter of a million prompts have been drawn.
    seen = {stream.draw(10_000).prompt for _ in range(20_000)}
    assert not seen & held_out
    free = random.Random(0)
    assert {tasks.TASKS["chain"](free)[0] for _ in range(200_000)} & held_out, "without the check some would be drawn"


@pytest.mark.parametrize("task", tasks.TASKS)
def test_answers_score_and_wrong_ones_do_not(task):
    rng = random.Random(3)
    for _ in range(50):
        example = tasks.Example(task, *tasks.TASKS[task](rng))
        assert tasks.score(example, " " + example.answer)
        words = example.answer.split()
        assert not tasks.score(example, "") and not tasks.score(example, " ".join(words[:-1]))
        assert not tasks.score(example, example.answer + " x")


def test_every_example_survives_the_tokenizer(tiny):
    tokenizer = tiny[1]
    for example in tasks.load_evaluation_set():
        ids = tokenizer.encode_raw(" " + example.answer)
        assert vocabulary.UNKNOWN not in ids and tokenizer.decode(ids) == example.answer
        prompt = tokenizer.encode_prompt(example.prompt, raw=False)
        assert prompt[:2] == [vocabulary.BOS, vocabulary.USER] and prompt[-1] == vocabulary.ASSISTANT
        assert prompt.count(vocabulary.BOS) == 1 and vocabulary.UNKNOWN not in prompt


def test_the_shipped_files_fit_and_are_the_real_layout():
    files = {path.name: path.stat().st_size for path in DIRECTORY.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= set(files)
    assert sum(files.values()) <= 8_000_000
    config = json.loads((DIRECTORY / "config.json").read_text())
    assert config["architectures"] == ["LLaDAModelLM"] and config["n_layers"] == SPEC.n_layers
    model, _ = load("tiny")
    assert model.dtype == jnp.bfloat16 and model.spec == SPEC


def test_masks_follow_the_objective():
    tokens, lengths = jnp.zeros((512, 24), jnp.int32), jnp.full((512,), 8, jnp.int32)
    masked, weight = draw_masks(jax.random.key(0), tokens, lengths, jnp.float32(0))
    masked, weight = np.asarray(masked), np.asarray(weight)
    assert not masked[:, :8].any()
    counts = masked.sum(axis=1)
    assert counts.min() == 1 and counts.max() == 16
    assert np.histogram(counts, bins=16, range=(0.5, 16.5))[0].tolist() == [32] * 16, (
        "stratified: every count equally often"
    )
    np.testing.assert_allclose(weight.sum(axis=1), 1, rtol=1e-6)
    uniform = masked[:, 8:]
    blockwise = np.asarray(draw_masks(jax.random.key(0), tokens, lengths, jnp.float32(1))[0])[:, 8:]
    by_eight = [row for row in blockwise if not fills_from_the_right(row, (4, 8))]
    assert 0.3 < len(by_eight) / 512 < 0.6, "half of the rows have blocks of 16 or 32, which is one block here"
    assert np.mean([fills_from_the_right(row, (4, 8)) for row in uniform]) < 0.3


def fills_from_the_right(row: np.ndarray, blocks: tuple[int, ...]) -> bool:
    """Whether for one of the block lengths all blocks are clean up to one and fully masked after it."""

    def holds(block: int) -> bool:
        shares = row.reshape(-1, block).mean(axis=1)
        return bool((np.diff(shares) >= 0).all() and ((shares > 0) & (shares < 1)).sum() <= 1)

    return any(map(holds, blocks))


def test_batches_are_deterministic_and_can_be_resumed():
    recipe = Recipe(steps=60, decay_steps=30, batch=8)
    take = lambda start, count: [b for b, _ in zip(batches(recipe, start), range(count), strict=False)]  # noqa: E731
    first, resumed = take(0, 50), take(30, 20)
    for (a, la), (b, lb) in zip(first[30:], resumed, strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(la, lb)
    sizes = {tokens.shape[1] for tokens, _ in first}
    assert sizes <= {*TIGHT_CANVASES, *(size for size, _ in LONG_CANVASES)} and len(sizes) > 3


@pytest.mark.slow
def test_train_tiny_learns_saves_and_resumes(tmp_path, capsys, monkeypatch):
    from polestar_jax.cli import train_tiny

    monkeypatch.setattr(train_tiny, "CHECKPOINT_EVERY", 20)
    out = tmp_path / "trained"
    common = ["--steps", "40", "--decay-steps", "10", "--batch", "8", "--cache-dir", "off"]
    original = train_tiny.Checkpoints.save

    def stop_after_20(self, step, carry):
        original(self, step, carry)
        if step == 20:
            raise KeyboardInterrupt

    monkeypatch.setattr("polestar_jax.tiny.train.REPORT_EVERY", 20)
    monkeypatch.setattr(train_tiny.Checkpoints, "save", stop_after_20)
    with pytest.raises(KeyboardInterrupt):
        main(["train-tiny", str(out), *common])
    assert not out.exists()
    monkeypatch.setattr(train_tiny.Checkpoints, "save", original)
    assert main(["train-tiny", str(out), *common]) == 0
    assert "going on from step 20" in capsys.readouterr().err
    assert main(["train-tiny", str(tmp_path / "whole"), *common]) == 0
    losses = [float(line.split()[3]) for line in capsys.readouterr().err.splitlines() if line.startswith("step")]
    assert losses[-1] < losses[0]
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["trained", "whole"]
    model, tokenizer = load(out, dtype="float32")
    assert generate(model, tokenizer, ["Copy the list: a b c d"], decoders.parallel(gen_length=8))[0].text is not None


def test_train_tiny_refuses_an_existing_directory(tmp_path, capsys):
    assert main(["train-tiny", str(tmp_path)]) == 2
    assert "exists" in capsys.readouterr().err
    assert main(["train-tiny", str(tmp_path / "x"), "--steps", "0"]) == 2
    assert main(["train-tiny", str(tmp_path / "x"), "--steps", "5"]) == 2 and not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        (
            "Tom has 12 apples. Tom buys 7 more. Tom eats 3. How many apples does Tom have now?",
            "12 + 7 = 19. 19 - 3 = 16. #### 16",
        ),
        ("Copy the list: d a c s b", "d a c s b"),
    ],
)
def test_it_answers(capsys, prompt, answer):
    status = main(["generate", "--prompt", prompt, "--gen-length", "64", "--cache-dir", "off"])
    assert status == 0 and capsys.readouterr().out.strip() == answer


def test_it_answers_a_sample_of_every_task(capsys, tmp_path):
    """A floor under what the README states, to notice weights, tokenizer or template falling out of step."""
    lengths = ["--gen-length", "48", "--block-length", "16", "--limit", "5", "--batch-size", "55"]
    argv = ["eval", "--task", "tiny", "--methods", "parallel", "--out", str(tmp_path), "--json", "--cache-dir", "off"]
    assert main([*argv, *lengths]) == 0
    (found,) = map(json.loads, capsys.readouterr().out.splitlines())
    accuracy = {task: part["metrics"]["accuracy"] for task, part in found["subsets"].items()}
    assert set(accuracy) == set(tasks.TASKS) and all(accuracy[task] >= 0.8 for task in ("copy", "replace", "remove"))
    assert found["metrics"]["accuracy"] >= 0.6 and found["tpf"]["non_eos"] > 1


def test_same_answer_from_every_layout(tiny, tmp_path):
    """Direct loading, a converted directory and the way back give the same tokens."""
    assert main(["convert", str(DIRECTORY), str(tmp_path / "orbax")]) == 0
    assert main(["convert", str(tmp_path / "orbax"), str(tmp_path / "hf"), "--to", "hf"]) == 0
    assert main(["verify", str(DIRECTORY), str(tmp_path / "hf")]) == 0
    decoder = decoders.parallel(gen_length=16)
    prompts = ["Sort the list: k c x a m"]
    expected = generate(*tiny, prompts, decoder)[0]
    for name in ("orbax", "hf"):
        got = generate(*load(tmp_path / name, dtype="float32"), prompts, decoder)[0]
        assert got.tokens == expected.tokens and got.text == expected.text and got.prompt_ids == expected.prompt_ids
