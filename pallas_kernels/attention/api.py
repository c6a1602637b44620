"""What callers import: checks, rotation of the rows, and the choice between the definition and the kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.attention import ref
from pallas_kernels.attention.ref import Distribution, Measured

DTYPES = ("float32", "bfloat16", "float16")


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    q_positions: jax.Array,
    k_positions: jax.Array,
    theta: float | None,
    valid: jax.Array | None = None,
    backend: str | None = None,
) -> jax.Array:
    """Softmax attention of rows over cached keys, which are rotated on the way; grouped query heads share a key/value head.

    Args:
      q: [b, r, h, e], k: [b, g, n, e], both before rotation; v: [b, g, e, n]: what a product sums over comes last.
      q_positions: i32 [b, r]; k_positions: i32 [b, n].
      theta: rotary base; None for no rotation.
      valid: bool [b, n] keys that exist, [b, r, n] (which no kernel serves), or None for all. A row with no valid key
        returns the mean of all values.
      backend: None, "xla", "pallas" or "interpret"; see :func:`pallas_kernels.dispatch.choose`.

    Returns:
      [b, r, h, e] in q's dtype. Scores and softmax are float32.

    Raises:
      ValueError: shapes or dtypes that do not go together.
      pallas_kernels.dispatch.Unsupported: ``backend`` names a kernel route that cannot serve this call.
    """
    return _run(q, k, v, q_positions, k_positions, theta, valid, None, False, backend).out


def measure(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None = None,
    *,
    previous: Distribution | None = None,
    q_positions: jax.Array | None = None,
    k_positions: jax.Array | None = None,
    theta: float | None = None,
    valid: jax.Array | None = None,
    backend: str | None = None,
) -> Measured:
    """What rows attend to, how far that moved (paper equations 3 and 4), and, with values, the attention's output.

    Arguments as in :func:`attend`; without ``theta`` neither side is rotated, which is how centroids attend: they have no
    position (specification 4.3). ``previous`` is the distribution to compare with, of the same shape.

    Returns:
      Measured. The drift is within 1e-5 of that of exact arithmetic on the same scores. A row with no valid key has drift 0.
    """
    return _run(q, k, v, q_positions, k_positions, theta, valid, previous, True, backend)


def _run(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    q_positions: jax.Array | None,
    k_positions: jax.Array | None,
    theta: float | None,
    valid: jax.Array | None,
    previous: Distribution | None,
    keep: bool,
    backend: str | None,
) -> Measured:
    if valid is not None and valid.ndim and valid.shape[0] == 1:
        valid = jnp.broadcast_to(valid, (q.shape[0], *valid.shape[1:]))
    _check(q, k, v, valid, previous)
    if theta is not None:
        if q.shape[-1] % 2:
            raise ValueError(f"head_dim {q.shape[-1]}: need an even one to rotate")
        q_positions = _positions("q_positions", q_positions, *q.shape[:2])
        k_positions = _positions("k_positions", k_positions, q.shape[0], k.shape[2])
        q = ref.rotate(q, q_positions[:, :, None], theta)
    args = {"q": q, "k": k}
    if v is not None:
        args["v"] = v
    if theta is not None:
        args["cos"], args["sin"] = ref.tables(k_positions, q.shape[-1], theta)
    if valid is not None:
        args["valid"] = valid.astype(jnp.int8)
    if previous is not None:
        args |= previous._asdict()
    platform = dispatch.current_platform()
    shapes = {name: jax.ShapeDtypeStruct(arg.shape, arg.dtype) for name, arg in args.items()}

    def build(route: str) -> None:
        kernel = _kernel(shapes, keep, interpret=route == "interpret")
        if route == "pallas":
            dispatch.check_builds(kernel, *shapes.values(), platform=platform)

    route = dispatch.choose("attention", platform=platform, backend=backend, build=build)
    if route != "xla":
        return _kernel(shapes, keep, interpret=route == "interpret")(*args.values())
    if theta is not None:
        k = ref.rotate(k, k_positions[:, None], theta)
    return ref.measure(q, k, v, valid, previous) if keep else Measured(None, None, ref.attend(q, k, v, valid))


def _check(
    q: jax.Array, k: jax.Array, v: jax.Array | None, valid: jax.Array | None, previous: Distribution | None
) -> None:
    for name, array in (("q", q), ("k", k)):
        if array.ndim != 4 or 0 in array.shape:
            raise ValueError(f"{name} {list(array.shape)}: need four axes, none of them empty")
    b, r, h, e = q.shape
    g, n = k.shape[1:3]
    shapes = {
        "k": (k.shape, (b, g, n, e)),
        "v": (None if v is None else v.shape, (b, g, e, n)),
        "previous.scores": (None if previous is None else previous.scores.shape, (b, h, r, n)),
        "previous.lse": (None if previous is None else previous.lse.shape, (b, h, r)),
        "valid": (None if valid is None else valid.shape, (b, n) if valid is None or valid.ndim == 2 else (b, r, n)),
    }
    for name, (shape, wanted) in shapes.items():
        if shape is not None and shape != wanted:
            raise ValueError(f"{name} {list(shape)}: need {list(wanted)} for q {list(q.shape)}")
    if h % g:
        raise ValueError(f"q has {h} heads: need a multiple of the {g} key heads")
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array is not None and (str(array.dtype) not in DTYPES or array.dtype != q.dtype):
            raise ValueError(f"{name} is {array.dtype}: need one of {', '.join(DTYPES)}, the same for all")

    if valid is not None and valid.dtype != bool:
        raise ValueError(f"valid is {valid.dtype}: need bool")
    for name, array in (previous._asdict() if previous is not None else {}).items():
        if array.dtype != jnp.float32:
            raise ValueError(f"previous.{name} is {array.dtype}: need float32")


def _positions(name: str, positions: jax.Array | None, b: int, count: int) -> jax.Array:
    """Positions i32 [b, count]; [1, count] stands for the same in every sequence."""
    if positions is None or positions.shape not in ((b, count), (1, count)):
        given = None if positions is None else list(positions.shape)
        raise ValueError(f"{name} {given}: need {[b, count]} to rotate")
    return jnp.broadcast_to(positions, (b, count))


def _kernel(shapes: dict[str, jax.ShapeDtypeStruct], keep: bool, *, interpret: bool) -> dispatch.Kernel:
    """The Pallas kernel for arguments of these shapes. Imported here: a jax without that route still has XLA."""
    try:
        from pallas_kernels.attention import triton
    except ImportError as error:
        raise dispatch.Unsupported(f"jax {jax.__version__} has no Pallas Triton route ({error})") from error
    return triton.plan(shapes, keep, interpret=interpret)
