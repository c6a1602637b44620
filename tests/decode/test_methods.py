"""What holds for every method, whatever it is made of: progress, nothing changed twice, batches, streams, parts, size."""

from __future__ import annotations

import ast
import functools
import inspect
import io
import itertools
import pathlib
import random
import re
import sys
import tokenize
import types

import numpy as np
import pytest

import polestar_jax
from polestar_jax import decoders, generation
from polestar_jax.decode import engine
from polestar_jax.decode.policy import Needs
from polestar_jax.decode.trace import Trace
from polestar_jax.decoders import METHODS, PARTS
from polestar_jax.errors import InputError
from polestar_jax.generation import generate
from tests.fakes import DREAM, MASK, SPEC, lively_model

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9, 7]]
SPECS = {"llada": SPEC, "dream": DREAM}
PACKAGE = pathlib.Path(polestar_jax.__file__).parent
slow = pytest.mark.slow


@functools.cache
def model_of(family):
    return lively_model(SPECS[family], 4)


def decoder_of(method, **settings):
    """The method over two blocks; AdaBlock with delimiters that the fake model proposes, SlowFast with more than one cycle."""
    method = METHODS[method]
    if settings.get("schedule", method.schedule) == "adablock":
        settings |= dict(delimiters=(27, 18, 16), delimiter_threshold=0.2)
    return method.build(gen_length=16, block_length=8, **settings).replace(trace=Trace("tokens", "committed", "block"))


FAST = {
    ("vanilla", "llada"),
    ("adablock", "llada"),
    ("fast_dllm_dual", "dream"),
}  # each method has fast tests of its own
FIELDS = ("nfe", "rows", "reason", "committed_at", "generated")


def cases():
    """Every method, LLaDA and Dream in turn: their own tests hold both families."""
    families = itertools.cycle(SPECS)
    return [
        pytest.param(method, family, marks=[] if (method, family) in FAST else slow, id=f"{method}-{family}")
        for method, family in zip(METHODS, families, strict=False)
    ]


@pytest.mark.parametrize(("method", "family"), cases())
def test_b06_progress_batches_and_nothing_committed_twice(method, family):
    """P1 to P5 and B06: of prompts of 5 and 9 tokens together, each pass commits, what is committed stays, the one that ends
    first waits; and each gives what it gives alone."""
    model, decoder = model_of(family), decoder_of(method)
    finished = generation.run(model, decoder, PROMPTS)
    state = finished.state
    for answer in generation.answers(finished, PROMPTS, model, decoder, None):
        tokens, committed = answer.trace["tokens"], answer.trace["committed"]
        assert len(tokens) == answer.stats.nfe <= decoder.max_passes
        assert (committed.sum(axis=1) >= 1).all() and (committed.sum(axis=0) == 1).all()
        before = np.full(16, MASK)
        for after, new in zip(tokens, committed, strict=True):
            np.testing.assert_array_equal(after != before, new)  # what is written was open, and nothing else moves
            before = after
        assert (tokens[-1] != MASK).all() and answer.tokens == tokens[-1].tolist()
        assert answer.stats.full_forwards + answer.stats.partial_forwards == answer.stats.nfe
        length = 16 + len(answer.prompt_ids)
        assert answer.stats.full_forwards * length <= answer.stats.rows <= answer.stats.nfe * length
    for row, pad, prompt in zip(np.asarray(state.tokens), np.asarray(state.pad), PROMPTS, strict=True):
        assert row[pad : pad + len(prompt)].tolist() == prompt
    for i, prompt in enumerate(PROMPTS):
        alone = generation.run(model, decoder, [prompt], first=i).state
        for field in FIELDS:
            np.testing.assert_array_equal(getattr(state, field)[i], getattr(alone, field)[0], err_msg=field)


@slow
@pytest.mark.parametrize(("method", "family"), [(method, list(SPECS)[(i + 1) % 2]) for i, method in enumerate(METHODS)])
def test_a_stream_gives_what_the_loop_gives(method, family):
    """P7, and P5: a pass over finished sequences leaves them as they are."""
    model, decoder = model_of(family), decoder_of(method)
    whole = generation.run(model, decoder, PROMPTS).state
    for state in engine.steps(model, decoder, engine.init_state(model, decoder, PROMPTS)):
        last = state
    for field in (*FIELDS, "tokens", "done", "passes"):
        np.testing.assert_array_equal(getattr(last, field), getattr(whole, field), err_msg=field)
    graph, weights = engine.split(model)
    finished, cache = last.replace(cache=None), whole.cache
    again, _ = engine._step(graph, weights, decoder.for_model(model.spec), finished, cache, plan=0)
    for field in (*FIELDS, "done"):
        np.testing.assert_array_equal(getattr(again, field), getattr(last, field), err_msg=field)


@pytest.mark.parametrize("method", ["fast_dllm_dual", pytest.param("polestar", marks=slow)])
def test_b38_nothing_is_left_from_one_run_to_the_next(method):
    """B38: runs of other lengths in between change nothing: caches are made anew for every call."""
    model, decoder = model_of("llada"), decoder_of(method)
    first = generate(model, None, [PROMPTS[0]], decoder)[0].tokens
    generate(model, None, [list(range(1, 20)) * 2], decoder)
    assert generate(model, None, [PROMPTS[0]], decoder)[0].tokens == first


def refused(**parts):
    try:
        decoder_of("vanilla", **parts)
    except InputError as error:
        return str(error)
    return None


def test_what_cannot_go_together_is_refused_with_the_reason():
    wanted = {
        ("dual", "dawn"): "commit Dawn goes by the attention of every row, and cache DualCache gives none",
        (
            "dual",
            "prophet",
        ): "goes by the scores of every generated position in every pass, and cache DualCache gives none",
        ("dkv", "polestar"): "commit PolestarCommit goes by token drift, and cache DelayedCache gives none",
    }
    for (cache, commit), message in wanted.items():
        assert message in refused(cache=cache, commit=commit)
    assert "adablock" in refused(schedule="adablock", cache="dual", first_token="force")
    for kind, parts in PARTS.items():
        assert refused(**{kind: "best"}) == f"setting {kind}='best' is not accepted: {' | '.join(parts)}"


def test_what_a_cache_gives_decides_which_rules_go_with_it():
    for cache, commit in itertools.product(PARTS["cache"], PARTS["commit"]):
        schedule = "cycles" if cache == "truncated" else "blocks"
        reason = refused(schedule=schedule, cache=cache, commit=commit)
        built = decoder_of("vanilla", schedule=schedule, cache=cache).cache
        rule = decoder_of("vanilla", commit=commit).commit
        needs = getattr(rule, "needs", Needs())
        missing = [
            need
            for need, asked in (
                ("drift", needs.drift),
                ("attention", needs.attention),
                ("every", needs.rows == "every"),
            )
            if asked and need not in built.gives
        ]
        assert bool(missing) == (reason is not None), (cache, commit, reason)


def combinations():
    """Twelve of the combinations that are accepted, the same each time, with every part among them."""
    every = [
        parts for parts in itertools.product(*PARTS.values()) if refused(**dict(zip(PARTS, parts, strict=True))) is None
    ]
    random.Random(5).shuffle(every)
    chosen, seen = [], set()
    for parts in every:
        new = {(kind, part) for kind, part in zip(PARTS, parts, strict=True)} - seen
        if new:
            chosen.append(parts)
            seen |= new
    assert len(seen) == sum(map(len, PARTS.values()))
    return chosen


@slow
@pytest.mark.parametrize(
    ("parts", "family"),
    list(zip(combinations(), itertools.cycle(SPECS), strict=False)),
    ids=lambda x: x if isinstance(x, str) else "-".join(x),
)
def test_parts_of_several_methods_decode_together(parts, family):
    """A combination decodes to the end and gives in a batch what it gives alone."""
    model, decoder = model_of(family), decoder_of("vanilla", **dict(zip(PARTS, parts, strict=True)))
    together = engine.decode(model, decoder, engine.init_state(model, decoder, PROMPTS))
    assert (np.asarray(together.generated) != MASK).all() and (np.asarray(together.committed_at) >= 0).all()
    alone = engine.decode(model, decoder, engine.init_state(model, decoder, PROMPTS[1], sequence_ids=[1]))
    for field in ("nfe", "committed_at", "generated"):
        np.testing.assert_array_equal(getattr(together, field)[1], getattr(alone, field)[0], err_msg=field)


@slow
def test_named_combinations_of_the_paper_decode():
    """Polestar-Commit on a dual cache, KLASS on Polestar-Cache, AdaBlock's schedule with either."""
    model = model_of("llada")
    for method, parts in (
        ("polestar", dict(cache="dual")),
        ("polestar", dict(commit="klass", kl_threshold=5.0, threshold=0.3)),
        ("polestar", dict(schedule="adablock")),
        ("polestar", dict(schedule="adablock", cache="dual")),
    ):
        decoder = decoder_of(method, **parts)
        answers = generate(model, None, PROMPTS, decoder, batch_size=2)
        assert all(answer.stats.nfe < 16 for answer in answers), parts
        if parts == dict(cache="dual"):
            assert sum(answer.stats.commits["drift"] for answer in answers) > 0


def test_sizes_that_do_not_add_up_are_refused_before_tracing():
    base = decoders.fast_dllm_prefix(gen_length=16, block_length=8)
    for change, message in (
        (dict(gen_length=32), "PrefixCache is for gen_length 16, not 32"),
        (dict(schedule=decoders.parallel(gen_length=16, block_length=16).schedule), "holds blocks of 8"),
    ):
        with pytest.raises(InputError, match=message):
            base.replace(**change)


def test_no_two_kinds_of_part_have_a_setting_of_the_same_name():
    names = {kind: {name for part in parts.values() for name in part.settings} for kind, parts in PARTS.items()}
    for one, other in itertools.combinations(names, 2):
        assert not names[one] & names[other]
    for method in METHODS.values():
        assert not set(method.defaults) - set(method.settings)


# Lines of code of the file that holds a part, without imports, blank lines, comments and docstrings; and the most it may have.
LIMITS = {
    "vanilla": ("commit/quota.py", 80),
    "parallel, factor": ("commit/threshold.py", 45),
    "fast_dllm": ("cache/fast_dllm.py", 75),
    "entropy_cache": ("cache/entropy.py", 50),
    "adablock": ("schedule/adablock.py", 50),
    "dkv_cache": ("cache/dkv.py", 50),
    "dpad": ("cache/dpad.py", 45),
    "elastic_cache": ("cache/elastic.py", 125),
    "d2_cache": ("cache/d2.py", 120),
    "d2_cache, commit": ("commit/certainty.py", 35),
    "dynamic_dllm, dllm_cache": ("cache/sublayers.py", 125),
    "dynamic_dllm": ("cache/dynamic.py", 35),
    "dynamic_dllm, commit": ("commit/adaptive.py", 45),
    "dllm_cache": ("cache/dllm_cache.py", 15),
    "sparse_dllm": ("cache/sparse.py", 90),
    "klass": ("commit/klass.py", 40),
    "dawn": ("commit/dawn.py", 45),
    "hierarchy": ("commit/hierarchy.py", 20),
    "prophet": ("commit/prophet.py", 45),
    "slowfast": ("schedule/cycles.py", 60),
    "slowfast, cache": ("cache/truncated.py", 30),
}


def lines_of_code(path):
    """Lines that hold a token of code and are no import."""
    text, lines, last = path.read_text(), set(), None
    imports = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for line in range(node.lineno, node.end_lineno + 1)
    }
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        layout = token.type in (
            tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT, tokenize.ENDMARKER,
        )  # fmt: skip
        prose = token.type == tokenize.STRING and last in (None, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
        if not layout and not prose:
            lines |= set(range(token.start[0], token.end[0] + 1))
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            last = token.type
    return len(lines - imports)


def test_methods_are_small(capsys):
    counts = {name: lines_of_code(PACKAGE / path) for name, (path, _) in LIMITS.items()}
    with capsys.disabled():
        print("\n" + "\n".join(f"{name:26}{count:4} lines of {LIMITS[name][1]:4}" for name, count in counts.items()))
    assert {name: count for name, count in counts.items() if count > LIMITS[name][1]} == {}
    policies = {p for kind in ("cache", "commit", "schedule") for p in (PACKAGE / kind).glob("*.py")}
    shared = {"__init__.py", "base.py", "none.py", "rule.py", "blocks.py", "whole.py"}
    assert {str(p.relative_to(PACKAGE)) for p in policies if p.name not in shared} == {
        path for path, _ in LIMITS.values()
    }


def test_neither_the_model_nor_the_engine_knows_a_method():
    names = {
        *METHODS,
        "fast_dllm",
        "elastic",
        "entropycache",
        "klass",
        "dawn",
        "hierarchy",
        "prophet",
        "slowfast",
        "dpad",
    }
    names -= {"vanilla", "parallel"}
    for path in [*(PACKAGE / "models").glob("*.py"), *(PACKAGE / "decode").glob("*.py")]:
        words = set(re.findall(r"[a-z0-9_]+", path.read_text().lower()))
        assert not (words & names) - {"polestar"}, path.name
        assert "polestar_jax.polestar" not in path.read_text()


def guide():
    """The blocks of code in the guide, with the names of the first one in the second."""
    text = (PACKAGE / "policies.md").read_text()
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


@pytest.mark.parametrize("index", [0, 1])
def test_the_guide_runs(index, monkeypatch):
    """A commit rule in under ten lines, a cache policy in under sixty; the cache with period 1 is no cache."""
    blocks = guide()
    module = types.ModuleType("guide")  # dataclasses look their module up
    monkeypatch.setitem(sys.modules, "guide", module)
    names = vars(module)
    exec(blocks[0], names)
    assert len([line for line in inspect.cleandoc(blocks[0]).splitlines() if line.strip()]) < 10
    model = model_of("llada")
    if index == 0:
        (answer,) = generate(model, None, [PROMPTS[0]], names["decoder"])
        assert answer.stats.nfe < 64 and answer.stats.full_forwards == 4
        return
    exec(blocks[1], names)
    assert len([line for line in blocks[1].splitlines() if line.strip()]) < 60
    plain = decoders.parallel(gen_length=16, block_length=8)
    ours = plain.replace(cache=names["Periodic"](block_length=8, period=1))
    same = [generate(model, None, [PROMPTS[0]], decoder)[0] for decoder in (plain, ours)]
    assert same[0].tokens == same[1].tokens and same[0].stats.nfe == same[1].stats.nfe
    fewer = plain.replace(cache=names["Periodic"](block_length=8, period=3))
    (answer,) = generate(model_of("dream"), None, [PROMPTS[0]], fewer)
    assert 0 < answer.stats.full_forwards < answer.stats.nfe
