"""The bench: what is counted is right, and its report and refusals are as promised. Times are only ever checked to be times."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import types

import jax
import numpy as np
import pytest

from polestar_jax import decoders
from polestar_jax.bench import report
from polestar_jax.bench.measure import Measured, by_kind, spread
from polestar_jax.bench.models import random_prompts
from polestar_jax.bench.products import compile_products, rows_in
from polestar_jax.bench.rows import Rows, count_rows, weight_bytes
from polestar_jax.bench.sizes import parse_sizes, random_spec
from polestar_jax.cli import main
from polestar_jax.decode import engine
from polestar_jax.decoders import variants
from polestar_jax.models.denoiser import Denoiser

LLADA = str(pathlib.Path(__file__).parents[1] / "data/checkpoints/llada")
SMALL = "layers=2,d_model=32,heads=4,vocab=64"
ONE_LAYER = SMALL.replace("layers=2", "layers=1")
RUN = ["--prompt-length", "20", "--gen-length", "16", "--block-length", "8", "--repeats", "2"]
# d 32, h = g = 4, e 8, f 96, v 64: weights of a layer (qkv, out, gate and up, down, two norms), and of the head with its norm.
LAYER, HEAD = 32 * 3 * 32 + 32 * 32 + 2 * 32 * 96 + 96 * 32 + 2 * 32, 64 * 32 + 32


def run(capsys, *argv: str) -> tuple[int, str, str]:
    status = main(["bench", *argv])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def random_model(sizes: str = SMALL) -> Denoiser:
    from polestar_jax.bench.models import random_model

    return random_model(parse_sizes(sizes), seed=0, dtype="float32")


@pytest.fixture(scope="module")
def row(tmp_path_factory) -> dict:
    """The JSON object of one run."""
    target = tmp_path_factory.mktemp("bench") / "report.jsonl"
    settings = ("polestar.clusters=3", "top_clusters=2", "quantization=none")
    argv = ["--random", ONE_LAYER, "--methods", "polestar", *(word for key in settings for word in ("--set", key))]
    assert main(["bench", *argv, "--json", "--output", str(target), *RUN]) == 0
    assert [path.name for path in target.parent.iterdir()] == ["report.jsonl"]
    (line,) = target.read_text().splitlines()
    return json.loads(line)


def test_every_documented_field_is_there(row):
    assert set(row) >= set(
        "run method settings model sizes dtype machine versions batch_size prompt_length gen_length block_length repeats seed "
        "compile_seconds passes nfe tokens tokens_non_eos tpf tps tpf_all tps_all speedups seconds seconds_each spread "
        "ms_per_forward bare_ms_per_forward overhead_share peak_memory_bytes kinds".split()
    )
    assert {"cpu", "cores", "jax", "device"} <= set(row["machine"]) and row["machine"]["jax"] == jax.__version__
    assert row["method"] == "polestar" and row["model"] == "random"
    assert row["sizes"]["parameters"] == LAYER + HEAD + 64 * 32
    assert row["settings"]["block_length"] == 8 and row["settings"]["gen_length"] == 16
    assert row["settings"]["clusters"] == 3


def test_passes_by_kind_add_up(row):
    found = {kind["kind"]: kind["passes"] for kind in row["kinds"]}
    # Two blocks: entered once with every row and once locally. Nothing commits more than one token a pass here, and the
    # fourth in a block since its entry makes the next pass refresh.
    assert found == {"full entry": 1, "local entry": 1, "refresh step": 2, "step": 12}
    assert row["nfe"] == row["passes"] == sum(found.values())


def test_numbers_go_together(row):
    assert row["tokens"] == 16 >= row["tokens_non_eos"]
    assert row["tpf_all"] == 16 / row["nfe"] and row["tpf"] == row["tokens_non_eos"] / row["nfe"]
    assert len(row["seconds_each"]) == 2 and row["seconds"] == pytest.approx(np.median(row["seconds_each"]))
    assert min(row["seconds_each"]) > 0 and row["peak_memory_bytes"] > 4 * row["sizes"]["parameters"]
    assert row["tps_all"] == pytest.approx(16 / row["seconds"])
    assert row["spread"] == pytest.approx(np.ptp(row["seconds_each"]) / row["seconds"])
    assert row["ms_per_forward"] == pytest.approx(1000 * row["seconds"] / row["passes"])
    bare = sum(kind["passes"] * kind["bare_ms"] for kind in row["kinds"]) / row["passes"]
    assert row["bare_ms_per_forward"] == pytest.approx(bare)
    assert row["overhead_share"] == pytest.approx(1 - bare / row["ms_per_forward"])
    for kind in row["kinds"]:
        assert kind["samples"] == 6 and kind["ms"] > 0 and kind["spread"] >= 0 and kind["bare_ms"] > 0
        assert kind["overhead_share"] == pytest.approx(1 - kind["bare_ms"] / kind["ms"]) and kind["overhead_share"] < 1
        assert kind["floor_bytes_per_second"] == pytest.approx(1000 * kind["floor_bytes"] / kind["ms"])
        assert kind["bytes_over_floor"] == pytest.approx(kind["bytes"] / kind["floor_bytes"])
        assert kind["bytes"] > kind["floor_bytes"]


def test_floor_is_every_weight_and_the_embedding_rows(row):
    canvas, block, window = 32 + 16, 8, 24  # 20 prompt tokens in 32 columns; two blocks before and one behind
    embedded = {"full entry": canvas, "local entry": block + window, "step": block, "refresh step": block + window}
    for kind in row["kinds"]:
        assert kind["rows"]["embedded"] == embedded[kind["kind"]]
        assert kind["floor_bytes"] == 4 * (LAYER + HEAD + 32 * embedded[kind["kind"]])


@pytest.mark.parametrize(
    ("family", "shift", "batch", "guidance", "layers"),
    [
        ("llada", 0, 1, 0.0, 2),
        ("dream", 1, 2, 1.5, 1),
        pytest.param("llada", 0, 2, 1.5, 1, marks=pytest.mark.slow),
        pytest.param("dream", 1, 1, 0.0, 2, marks=pytest.mark.slow),
    ],
)
def test_rows_are_those_of_the_plan(family, shift, batch, guidance, layers):
    model = random_model(f"layers={layers},d_model=32,heads=4,kv_heads=2,vocab=64,family={family}")
    polestar = decoders.polestar(gen_length=16, block_length=8, clusters=3, top_clusters=2, guidance=guidance)
    vanilla = decoders.vanilla(gen_length=16, block_length=8, guidance=guidance)
    prompts = random_prompts(model.spec, batch, 20, seed=0)
    n, block, window = 48, 8 + shift, 24
    expected = {
        "pass": (n, n, n, 8),
        "full entry": (n, n + 3, n, 8),
        "local entry": (block + window, block + window + 3, block + window, 8),
        "refresh step": (block + window, block + window + 3, block + window, 8 + 8),  # the suffix is scored as well
        "step": (block, block, block, 8),
    }
    times = batch * (2 if guidance else 1)
    for decoder in (vanilla, polestar):
        state = engine.init_state(model, decoder, prompts)
        for plan in decoder.cache.plans:
            rows = count_rows(model, decoder, state, plan.name)
            embedded, projected, finished, scored = (times * count for count in expected[plan.name])
            expect = Rows(
                embedded=embedded, projected=(projected,) * layers, finished=(finished,) * layers, scored=scored
            )
            assert rows == expect


def test_of_a_conditional_the_fewest_rows_count():
    model = random_model()
    decoder = decoders.polestar(gen_length=16, block_length=8, packet_capacity=5)
    rows = count_rows(model, decoder, engine.init_state(model, decoder, [1, 2, 3]), "refresh step")
    assert rows.projected == (8 + 24 + 8,) * 2 and rows.finished == (8 + 5,) * 2


def test_a_refresh_without_suffix_commits_scores_the_block_alone():
    model = random_model(ONE_LAYER)
    decoder = decoders.polestar(gen_length=16, block_length=8, suffix_commit=False)
    state = engine.init_state(model, decoder, [1, 2, 3])
    assert count_rows(model, decoder, state, "refresh step").scored == 8


@pytest.mark.parametrize("sizes", [SMALL, f"{SMALL},kv_heads=2,family=dream"])
@pytest.mark.parametrize("projected, finished, scored", [(48, 48, 8), (35, 32, 16), (8, 8, 8), (8, 12, 16)])
def test_bare_products_are_all_there_and_nothing_else(sizes, projected, finished, scored):
    model = random_model(sizes)
    spec = model.spec
    rows = Rows(embedded=1, projected=(projected,) * 2, finished=(finished,) * 2, scored=scored)
    products = compile_products(model, rows)
    fused = (spec.n_heads + 2 * spec.n_kv_heads) * spec.head_dim
    layer = projected * 32 * fused + finished * (32 * 32 + 3 * 32 * spec.d_ff)
    assert products.cost_analysis()["flops"] == pytest.approx(2 * (2 * layer + scored * 32 * 64), rel=0.01)
    last, logits = products(engine.split(model)[1], rows_in(model, rows))
    assert last.shape == (finished, 32) and logits.shape == (scored, 64)


def test_bare_products_are_those_of_the_model():
    model = random_model(ONE_LAYER)
    layer = model.layers[0]
    rows = Rows(embedded=1, projected=(6,), finished=(5,), scored=4)
    given = np.asarray(rows_in(model, rows))
    last, logits = compile_products(model, rows)(engine.split(model)[1], given)
    heads = (given @ np.asarray(layer.qkv[...]).reshape(32, -1)).reshape(6, 4, 3, 8)[:5, :, 0].reshape(5, 32)
    gate = heads @ np.asarray(layer.out[...]).reshape(32, 32) @ np.asarray(layer.gate_up[...])[:, 0]
    np.testing.assert_allclose(last, gate @ np.asarray(layer.down[...]), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(logits, np.asarray(last)[:4] @ np.asarray(model.head[...]), rtol=1e-4, atol=1e-6)


def test_floor_counts_the_dtype_and_biases():
    model = random_model(f"{SMALL},kv_heads=2,family=dream")
    rows = Rows(embedded=5, projected=(5, 5), finished=(5, 5), scored=5)
    layer = 32 * 64 + 64 + 32 * 32 + 3 * 32 * 96 + 2 * 32
    assert weight_bytes(model, rows) == 4 * (2 * layer + HEAD + 5 * 32)
    assert weight_bytes(Denoiser.abstract(model.spec, "bfloat16"), rows) == 2 * (2 * layer + HEAD + 5 * 32)


def test_table_names_machine_model_runs_and_kinds(capsys):
    argv = ["--model", LLADA, "--methods", "parallel,vanilla[steps=4]", "--sweep", "parallel.threshold=0.9,0.5", *RUN]
    status, out, err = run(capsys, *argv, "--batch-size", "2")
    assert status == 0 and "round 2 of 2: vanilla[steps=4]" in err
    machine, model, about, _, head, *lines = out.splitlines()
    assert machine.startswith("machine: ") and f"jax {jax.__version__}" in machine
    assert model.startswith(f"model: {LLADA}, llada, ") and "vocabulary 260" in model
    assert "batch 2, prompt 20, gen 16, block 8; medians of 2" in about
    assert head.split()[:10] == "run tokens passes NFE TPF TPS x vanilla x parallel".split()
    high, low, vanilla = (line.split() for line in lines[:3])
    assert [row[0] for row in (high, low, vanilla)] == [
        "parallel[threshold=0.9]",
        "parallel[threshold=0.5]",
        "vanilla[steps=4]",
    ]
    assert high[6:8] == low[6:8] == vanilla[6:8] == ["-", "-"], "neither plain vanilla nor plain parallel is there"
    assert vanilla[2:4] == ["4", "8"], "four passes, each for two sequences"
    rows = [line.split()[:3] for line in lines[5:8]]
    assert rows == [[high[0], "pass", high[2]], [low[0], "pass", low[2]], ["vanilla[steps=4]", "pass", "4"]]


@pytest.mark.parametrize("method", ["vanilla", "fast_dllm_dual"])
def test_the_clock_stops_when_a_pass_is_over(monkeypatch, method):
    """Also where there is no cache to wait for: the tokens and scores are there before the time is taken."""
    decoder = decoders.METHODS[method].build(gen_length=8, block_length=4)
    waited, wait = [], jax.block_until_ready
    monkeypatch.setattr(jax, "block_until_ready", lambda x: waited.append(jax.tree.leaves(x)) or wait(x))
    kinds, state = by_kind(random_model(ONE_LAYER), decoder, [[1, 2, 3]], repeats=2)
    shapes = [{leaf.shape for leaf in leaves} for leaves in waited if leaves]
    assert sum(state.tokens.shape in found for found in shapes) >= 3 * len(kinds), "one to warm up, two timed"


def measured(run: str, *seconds: float, tokens: int = 8) -> Measured:
    method, own = variants.parse_key(run)
    decoder = decoders.METHODS[method].build(gen_length=8, block_length=4, **decoders.METHODS[method].parsed(own))
    fixed = dict(compile_seconds=0.0, passes=4, nfe=4, tokens_non_eos=tokens, peak_bytes=None, kinds=())
    return Measured(run=run, decoder=decoder, seconds=seconds, tokens=tokens, **fixed)


def test_b64_faster_than_what_is_told_round_by_round():
    """A machine that slows down does so for all: ratios are of rounds, not of medians over all of them."""
    plain, parallel = measured("vanilla", 8.0, 16.0, 80.0), measured("parallel", 4.0, 4.0, 40.0)
    cached = measured("fast_dllm_dual", 16.0, 32.0, 40.0)
    found = report.speedups(cached, [plain, parallel, cached])
    assert found == {
        "vanilla": {"median": 0.5, "lowest": 0.5, "highest": 2.0},
        "parallel": {"median": 0.25, "lowest": 0.125, "highest": 1.0},
    }
    assert report.speedups(parallel, [plain, parallel])["vanilla"] == {"median": 2.0, "lowest": 2.0, "highest": 4.0}
    assert spread(cached.seconds) == 24 / 32


def test_b64_no_speed_up_without_both_baselines():
    plain, parallel, cached = (measured(name, 1.0) for name in ("vanilla", "parallel", "fast_dllm_dual"))
    variant = measured("parallel[threshold=0.5]", 1.0)
    for results in ([plain, cached], [parallel, cached], [plain, variant, cached]):
        assert report.speedups(cached, results) == {}


@pytest.mark.parametrize("gen", [32, pytest.param(1024, marks=pytest.mark.slow)])
def test_b64_a_short_and_a_long_run_tell_each_kind_of_pass_and_both_baselines(tmp_path, gen):
    """A cache may be slower where answers are short: what a pass of each kind takes is told beside both baselines."""
    target = tmp_path / "report.jsonl"
    lengths = ["--prompt-length", "20", "--gen-length", str(gen), "--block-length", str(gen // 4)]
    argv = ["--random", ONE_LAYER, "--methods", "vanilla,parallel,fast_dllm_dual"]
    settings = ["fast_dllm_dual.commit=quota", "fast_dllm_dual.steps=8"]  # two passes a block
    settings += ["vanilla.steps=8", "parallel.threshold=0"] if gen == 1024 else []
    argv += [word for setting in settings for word in ("--set", setting)]
    assert main(["bench", *argv, *lengths, "--repeats", "1", "--json", "--output", str(target)]) == 0
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert [row["run"] for row in rows] == ["vanilla", "parallel", "fast_dllm_dual"]
    assert [{kind["kind"] for kind in row["kinds"]} for row in rows] == [{"pass"}, {"pass"}, {"entry", "step"}]
    for row in rows:
        assert set(row["speedups"]) == ({"vanilla", "parallel"} if gen == 32 else set()) and row["tokens"] == gen
        assert sum(kind["passes"] for kind in row["kinds"]) == row["passes"] and all(
            kind["ms"] > 0 for kind in row["kinds"]
        )
    assert gen == 1024 or rows[0]["speedups"]["vanilla"]["median"] == 1


def test_sizes_default_to_the_mid_model():
    spec = random_spec(parse_sizes("mid"))
    assert (spec.n_layers, spec.d_model, spec.n_heads, spec.n_kv_heads, spec.head_dim) == (8, 512, 8, 8, 64)
    assert (spec.d_ff, spec.vocab_size, spec.family) == (1536, 8192, "llada")
    assert random_spec(parse_sizes("mid,layers=3")) == dataclasses.replace(spec, n_layers=3)
    assert parse_sizes("layers=3") == parse_sizes("mid,layers=3")
    assert type(spec).from_json(spec.to_json()) == spec, "values a file may hold"


def test_prompts_hold_no_special_tokens():
    spec = random_spec(parse_sizes("vocab=8"))
    prompts = random_prompts(spec, 3, 200, seed=1)
    assert np.shape(prompts) == (3, 200) and set(np.ravel(prompts)) == set(range(5))
    assert prompts == random_prompts(spec, 3, 200, seed=1) != random_prompts(spec, 3, 200, seed=2)


def test_b59_device_memory_is_what_the_allocator_handed_out(monkeypatch):
    """With preallocation the pool is most of the device; what was in use is the same with and without."""

    class Device:
        device_kind, platform = "a GPU", "gpu"
        pool = 0

        def memory_stats(self):
            return {
                "peak_bytes_in_use": 3 << 20,
                "bytes_limit": 96 << 20,
                "pool_bytes": self.pool,
                "bytes_reserved": self.pool,
            }

    lines = []
    for Device.pool in (0, 96 << 20):
        monkeypatch.setattr(jax, "devices", lambda: [Device()])
        assert report.machine().items() >= {"allocator_peak_bytes": 3 << 20, "allocator_limit_bytes": 96 << 20}.items()
        run = dict(model="m", batch_size=1, prompt_length=1, gen_length=1, block_length=1, repeats=1)
        monkeypatch.setattr(report, "aligned", lambda rows, words: [])
        lines.append(report.table([], random_model_stub(), run).splitlines()[0])
    assert "peak of device memory 3.0 MiB; limit of device memory 96.0 MiB" in lines[0] and lines[0] == lines[1]


def test_b59_a_backend_that_does_not_count_says_nothing():
    assert report.allocator(jax.devices()[0]) == {}


def random_model_stub():
    return types.SimpleNamespace(spec=random_spec(parse_sizes(SMALL)), dtype="float32")


@pytest.mark.parametrize(
    "argv, words",
    [
        (
            ["--methods", "vanilla,nonsense"],
            "unknown method 'nonsense'; methods: all, vanilla, parallel, fast_dllm_prefix, fast_dllm_dual, fast_dllm_factor, "
            "entropy_cache, adablock, dkv_cache, dpad, "
            "dynamic_dllm, dllm_cache, sparse_dllm, elastic_cache, d2_cache, klass, dawn, hierarchy, prophet, slowfast, polestar",
        ),
        (["--methods", ""], "unknown method ''"),
        (["--methods", "vanilla,vanilla"], "run vanilla is asked for twice"),
        (["--repeats", "0"], "--repeats 0 is not accepted: a whole number in 1..1000"),
        (["--repeats", "x"], "invalid int value: 'x'"),
        (["--batch-size", "0"], "--batch-size 0"),
        (["--prompt-length", "-1"], "--prompt-length -1"),
        (["--gen-length", "0"], "--gen-length 0"),
        (["--gen-length", "20", "--block-length", "8"], "gen_length 20 is not a multiple of block_length 8"),
        (["--seed", "-1"], "--seed -1"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
        (["--model", "tiny", "--random", "mid"], "not allowed with"),
        (["--model", "nowhere"], "no model 'nowhere'"),
        (["--prompt-length", "500"], "more than the model's max_length 512"),
        (["--random", "big"], "--random 'big' is not accepted: mid, or SIZE=VALUE with a size of layers, d_model"),
        (["--random", "layers=0"], "setting layers=0 is not accepted: a whole number >= 1"),
        (["--random", "layers=2,layers=3"], "layers is given twice"),
        (["--random", "heads=4,kv_heads=3"], "a divisor of heads=4"),
        (["--random", "d_model=36,heads=4"], "a multiple of 8"),
        (
            ["--random", "layers=1,d_model=40,heads=4,vocab=64", "--methods", "polestar"],
            "no multiple of the group of 16",
        ),
        (["--set", "clusters"], "KEY=VALUE or METHOD.KEY=VALUE"),
        (["--set", "klusters=3"], "no setting 'klusters' in vanilla, parallel, polestar"),
        (["--set", "vanilla.clusters=3"], "no setting 'clusters' in vanilla; there is:"),
        (["--set", "klass.clusters=3"], "'klass' is none of the methods vanilla, parallel, polestar"),
        (["--set", "clusters=1"], "setting clusters=1 is not accepted: a whole number >= 2"),
        (["--set", "clusters=4", "--set", "clusters=5"], "setting clusters is given twice: 4 and 5"),
        (["--set", "gen_length=32"], "run vanilla: gen_length is the same for all; use --gen-length"),
        (["--sweep", "clusters"], "--sweep clusters is not accepted: KEY=A,B,... or METHOD.KEY=A,B,..."),
        (["--aot", "h100", "--methods", "polestar[alpha=5]"], "--methods polestar[alpha=5] does not go with --aot"),
        (["--aot", "h100", "--sweep", "alpha=5"], "--sweep does not go with --aot"),
        (["--output", "nowhere/report"], "nowhere does not exist"),
    ],
)
def test_refusals_are_one_line_and_status_two(capsys, monkeypatch, tmp_path, argv, words):
    monkeypatch.chdir(tmp_path)
    status, out, err = run(capsys, *argv)
    assert status == 2 and out == ""
    (line,) = err.strip().splitlines()
    assert line.startswith("polestar bench: error: ") and words in line
