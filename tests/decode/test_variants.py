"""Which runs are asked for: methods, their variants, sweeps."""

from __future__ import annotations

import pytest

from polestar_jax.decoders import METHODS, variants
from polestar_jax.errors import InputError


def test_runs_have_settings_sweeps_and_variants():
    found = variants.build(
        "vanilla,parallel[threshold=0.80],polestar", ["threshold=0.7", "polestar.history=3"], ["alpha=2.5,5", "history=1"],
        gen_length=64, block_default=16,
    )  # fmt: skip
    assert list(found) == [
        "vanilla", "parallel[threshold=0.8]", "polestar[alpha=2.5]", "polestar[alpha=5]", "polestar[history=1]",
    ]  # fmt: skip
    settings = {key: decoder.settings() for key, decoder in found.items()}
    assert settings["parallel[threshold=0.8]"]["threshold"] == 0.8, "a run's own setting comes before --set"
    assert [settings[key]["history"] for key in list(found)[2:]] == [3, 3, 1]
    assert [settings[key]["alpha"] for key in list(found)[2:]] == [2.5, 5.0, 10.0]
    assert all(s["gen_length"] == 64 and s["block_length"] == 16 for s in settings.values())
    for key in found:
        assert variants.run_key(*variants.parse_key(key)) == key


def test_block_lengths_go_to_methods_with_blocks():
    lengths = lambda **more: {  # noqa: E731
        key: decoder.settings()["block_length"]
        for key, decoder in variants.build(
            "parallel,d2_cache,slowfast", gen_length=64, block_default=16, **more
        ).items()
    }
    assert lengths() == {"parallel": 16, "d2_cache": 64, "slowfast": 64}
    assert lengths(block_length=8)["slowfast"] == 8
    assert lengths(settings=["block_length=32"])["parallel"] == 32
    assert list(variants.build("parallel", sweeps=["block_length=8,16"], gen_length=64)) == [
        "parallel[block_length=8]", "parallel[block_length=16]",
    ]  # fmt: skip


def test_joined_settings_change_together():
    joined = "window_prefix:window_suffix"
    found = variants.build("vanilla,polestar", sweeps=[f"{joined}=16:0,32:16"], gen_length=64, block_default=16)
    assert list(found) == ["vanilla", f"polestar[{joined}=16:0]", f"polestar[{joined}=32:16]"]
    windows = [[decoder.settings()[key] for key in joined.split(":")] for decoder in list(found.values())[1:]]
    assert windows == [[16, 0], [32, 16]]
    again = variants.build(f"polestar[{joined}=16:00]", sweeps=["alpha=5"], gen_length=64, block_default=16)
    assert list(again) == [f"polestar[{joined}=16:0,alpha=5]"]
    assert variants.run_key(*variants.parse_key(next(iter(again)))) == next(iter(again))


def test_all_methods_are_runs():
    assert list(variants.build("all", gen_length=64, block_default=16)) == list(METHODS)


@pytest.mark.parametrize(
    ("methods", "options", "word"),
    [
        ("nosuch", {}, "unknown method 'nosuch'; methods: all, vanilla"),
        ("polestar[clusters:top_clusters=8]", {}, "clusters:top_clusters=8 is not accepted: 2 values with colons"),
        ("polestar[alpha=5,alpha:history=5:1]", {}, "setting alpha is given twice: 5 and 5"),
        ("polestar", {"sweeps": ["alpha:gamma=5:1"]}, "no setting 'gamma' in polestar"),
        (
            "parallel,polestar",
            {"sweeps": ["alpha:threshold=5:1"]},
            "none of parallel, polestar has all of alpha, threshold",
        ),
        ("polestar", {"settings": ["polestar.alpha=no"], "sweeps": ["alpha=5"]}, "alpha=no is not accepted"),
        ("parallel,parallel", {}, "run parallel is asked for twice"),
        ("parallel[threshold]", {}, "NAME[KEY=VALUE,...]"),
        ("parallel[alpha=5]", {}, "no setting 'alpha'"),
        ("parallel[threshold=high]", {}, "threshold=high is not accepted"),
        ("adablock[delimiters=1]", {}, "is a list"),
        ("parallel", {"sweeps": ["alpha=1,2"]}, "no setting 'alpha' in parallel; there is: "),
        ("parallel", {"sweeps": ["alpha"]}, "KEY=A,B,..."),
        ("parallel", {"sweeps": ["polestar.alpha=1"]}, "'polestar' is none of the methods parallel"),
        ("polestar", {"sweeps": ["alpha=5,5.0"]}, "polestar[alpha=5] is asked for twice"),
        ("polestar", {"settings": ["alpah=1"]}, "no setting 'alpah' in polestar"),
        ("polestar", {"settings": ["alpha=1", "alpha=2"]}, "given twice: 1 and 2"),
        ("polestar", {"settings": ["parallel.threshold=1"]}, "'parallel' is none of the methods polestar"),
    ],
)
def test_wrong_runs_are_refused(methods, options, word):
    with pytest.raises(InputError) as error:
        variants.build(methods, gen_length=64, block_default=16, **options)
    assert word in str(error.value)
