"""The methods: what each is made of, where it comes from, what a pass costs, and where it differs from its authors' code."""

from __future__ import annotations

from polestar_jax.decoders.method import Method
from polestar_jax.polestar.presets import RELEASE

FAST_DLLM = "Fast-dLLM, arXiv 2505.22618"
_METHODS = (
    Method(
        name="vanilla",
        commit="quota",
        summary="a fixed number of commits a pass, every row recomputed",
        source="LLaDA, arXiv 2502.09992; Dream, arXiv 2508.15487",
        cost="every row, every pass; one token a pass by default",
        deviations=(
            "Dream commits by blocks with an even quota by default; quota=dream_floor with block_length=gen_length is its own "
            "sampler, whose first pass commits nothing",
            "the mask token is never proposed (exclude_mask=false: as the authors')",
        ),
    ),
    Method(
        name="parallel",
        commit="threshold",
        summary="every position above a confidence threshold, every row recomputed",
        source=FAST_DLLM,
        cost="every row, every pass",
    ),
    Method(
        name="fast_dllm_prefix",
        cache="prefix",
        commit="fast_dllm",
        summary="a confidence threshold; a block's entry computes every row, a step the block and all after it",
        source=FAST_DLLM,
        cost="every row at a block's entry, then those from the block on, rounded up to a half, a quarter, ... of the generation",
        deviations=(
            "Dream's first position of a block is read from the row before it (first_token=force: decided by the entry)",
            "no empty pass over a block that its entry has completed",
        ),
    ),
    Method(
        name="fast_dllm_dual",
        cache="dual",
        commit="fast_dllm",
        summary="a confidence threshold; a block's entry computes every row, a step the block's alone",
        source=FAST_DLLM,
        cost="every row at a block's entry, then the block's",
        deviations=(
            "Dream's first position of a block is read from the row before it (first_token=force: decided by the entry)",
            "no empty pass over a block that its entry has completed",
        ),
    ),
    Method(
        name="fast_dllm_factor",
        commit="factor",
        summary="as many of the most confident as a factor allows, every row recomputed",
        source=FAST_DLLM,
        cost="every row, every pass (cache=prefix, cache=dual: as those)",
        deviations=("the candidate that alone fails is not committed; the public code commits it",),
    ),
    Method(
        name="entropy_cache",
        cache="entropy",
        commit="threshold",
        summary="a confidence threshold; every row is computed after a commit from an uncertain distribution",
        source="EntropyCache, arXiv 2603.18489",
        cost="every row, or the undecided ones of the block and those committed last",
        deviations=(
            "no code is published: entropy_threshold and recent are our settings",
            "a block's entry computes every row only after an uncertain commit (entry_full=true: always)",
        ),
    ),
    Method(
        name="adablock",
        schedule="adablock",
        commit="threshold",
        summary="a confidence threshold over blocks that end at a confident delimiter, every row recomputed",
        source="AdaBlock-dLLM, arXiv 2509.26432",
        cost="every row, every pass (cache=prefix, cache=dual: as those, with the rows of the longest block)",
        deviations=(
            "Dream commits by threshold from a block's entry with any cache; under the authors' dual cache it commits the first "
            "position alone",
            "of models that are not published the delimiters are the tokens with a new line",
        ),
    ),
    Method(
        name="dkv_cache",
        cache="dkv",
        commit="quota",
        summary="a fixed number a pass; keys and values are kept one pass after a token was decided",
        source="dKV-Cache, arXiv 2505.15781",
        cost="every row twice a block and every refresh_every passes, else all undecided rows and the last decided ones",
        deviations=(
            "the decode variant alone: the greedy one needs an order drawn beforehand",
            "Dream computes decided tokens once more and the row before each undecided one; the authors shift which are kept",
        ),
    ),
    Method(
        name="dpad",
        cache="dpad",
        commit="threshold",
        summary="a confidence threshold; most of the undecided suffix is not attended to, redrawn at each block",
        source="DPad, arXiv 2508.14148",
        cost="as the cache inside: rows that are dropped are computed and attended to by nobody",
        deviations=("no early stop at an end of text",),
    ),
    Method(
        name="dynamic_dllm",
        cache="dynamic",
        commit="adaptive",
        summary="a threshold that predictions move; layers recompute a window and what moved most, by a shared budget",
        source="Dynamic-dLLM, arXiv 2606.26120",
        cost="every row once; then all generated rows in the first layer and as many as window and budget allow in the others; "
        "the projections and the head on all generated rows",
        deviations=(
            "layers share the budget by softmax(200 d); in the code a factor of 1e-8 makes the shares even (budget_scale=0: so)",
            "d is measured before the cache is overwritten, over all layers but the first, whose d the code has at 0",
            "a layer's budget is cut at four times the average, for a static shape",
            "the prompt's rows of the first layer are not recomputed between refreshes: nothing reads them",
            "Dream's row before the generation is always computed, that before the window too: they score a first position",
        ),
    ),
    Method(
        name="dllm_cache",
        cache="dllm_cache",
        commit="quota",
        summary="a fixed number a pass; layers recompute the quarter of the generation whose values moved most",
        source="dLLM-Cache, arXiv 2506.06295",
        cost="every row at first, the prompt's every prompt_interval passes, the generation's every response_interval; else all "
        "generated rows in the first layer, a share in the others; the projections on all generated rows",
        deviations=(
            "one pair of intervals, LLaDA's for GSM8K; the authors choose them by task and model (Dream for GSM8K: 25 and 2)",
            "the prompt's rows of the first layer are not recomputed between refreshes: nothing reads them",
            "Dream's row before the generation is always computed: it scores the first position",
        ),
    ),
    Method(
        name="sparse_dllm",
        cache="sparse",
        commit="quota",
        summary="a fixed number a pass; a block sees itself and the most important half of all else",
        source="Sparse-dLLM, arXiv 2508.02558",
        cost="every row twice a block, then the block's rows against the kept columns and themselves",
        deviations=(
            "in a batch each sequence keeps its share of its own length; the authors' code takes one sequence",
            "Dream's row before the block is computed with it, as a part of it",
            "no pass over a block that is complete: one that takes a single pass leaves no cache",
        ),
    ),
    Method(
        name="elastic_cache",
        schedule="whole",
        cache="elastic",
        commit="threshold",
        summary="a confidence threshold over a sliding window; layers above one whose attention drifted compute every row",
        source="Elastic-Cache, arXiv 2510.14973",
        cost="every row at first; then the window's, the last pass's commits and a tracked token a layer, and every row above a "
        "layer that drifted; keeps the inputs of every layer as well",
        deviations=(
            "similarity across keys, as the paper's vectors of attention weights (sim_axis=heads: as the authors' code)",
            "a window of 32 for both families, which the authors' LLaDA scripts set and never pass on",
            "no cut at an end of text, which leaves masks in the output",
            "queries are not kept but computed again from the kept inputs",
        ),
    ),
    Method(
        name="d2_cache",
        schedule="whole",
        cache="d2",
        commit="certainty",
        summary="one token a pass, by confidence and density; after a full pass only promising, new and influential rows",
        source="d2Cache, arXiv 2509.23094",
        cost="every row once, then at most 2 x candidates rows and a share of the canvas; the attention maps of computed rows",
        deviations=(
            "a position's confidence is of the last pass that scored it (conf_update=false: of the first, as the authors' code)",
            "positions that a pass does not compute cannot be committed; the authors' code commits them at 1 / vocabulary",
            "at most row_capacity rows: the best undecided position first, then new tokens, other promising and influential "
            "rows; new tokens left over come next pass",
            "in a batch sequences compute as many rows as each needs, none to fill up",
        ),
    ),
    Method(
        name="klass",
        commit="klass",
        summary="every position that is confident and whose distribution has come to rest, every row recomputed",
        source="KLASS, arXiv 2511.05664",
        cost="every row, every pass, the head at every generated position; keeps a distribution of each, in float32",
        deviations=(
            "blocks of 32; the authors take 64 for LLaDA and none for Dream",
            "where nothing is stable the most confident position is committed (steps = gen_length); the authors' Dream ranks at "
            "temperature 0.2 and top_p 0.95",
            "confidences are of the plain softmax in float32, not float64",
            "under a cache a position's history is of the passes that scored it (block history)",
        ),
    ),
    Method(
        name="dawn",
        commit="dawn",
        summary="sure positions, those that depend on sure ones, and others that do not depend on each other",
        source="DAWN, arXiv 2602.06953",
        cost="every row, every pass, the head at every row and the attention maps of the last four layers",
        deviations=(
            "a committed token is never overwritten; the public code writes position 0 wherever two candidates conflict",
            "of Dream the first token of the prompt, which no row scores, is no anchor",
            "low_threshold is one a family; the authors' LLaDA scripts take 0.75 to 0.8 by task, 0.7 for MBPP",
        ),
    ),
    Method(
        name="hierarchy",
        commit="hierarchy",
        summary="every position above a threshold and the best of each run of undecided ones, every row recomputed",
        source="Hierarchy-dLLM, dInfer, arXiv 2510.08666",
        cost="every row, every pass (cache=prefix, cache=dual: as those)",
        deviations=(
            "of equally confident positions of a run the first is committed, not all",
            "no variant that masks decided tokens again",
        ),
    ),
    Method(
        name="prophet",
        commit="prophet",
        summary="a fixed number a pass until the answer is clear, then all that is left at once",
        source="Prophet, arXiv 2508.19982",
        cost="every row, every pass, the head at every generated position",
        deviations=(
            "where the answer is need not be known: by default all undecided positions count (answer_start: as the authors')",
            "no words are forced before the answer",
        ),
    ),
    Method(
        name="slowfast",
        schedule="cycles",
        cache="truncated",
        commit="threshold",
        summary="slow passes look how far the model is certain, fast ones finish that far",
        source="SlowFast, arXiv 2506.10848",
        cost="every row, every pass: what a fast pass truncates is hidden, not left out",
        deviations=(
            "a cycle or block that is complete moves on without empty passes",
            "the authors' two rules, all above the threshold if at least two and else the best, are the threshold rule",
        ),
    ),
    Method(
        name="polestar",
        cache="polestar",
        commit="polestar",
        summary="a cache refreshed, and tokens committed, where token representations drift",
        source="Polestar, arXiv 2607.14107",
        cost="every row, or the block's and its window's, at a block's entry; then the block's; the window's too at a refresh",
        presets={"paper": {}, "release": RELEASE},
    ),
)
METHODS = {method.name: method for method in _METHODS}
