"""A kernel simulated in numpy, with all roundings and a tree of additions, and with an optional bug."""
import ml_dtypes
import numpy as np

F = np.float32
TYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
LANES = 64  # running sums of a row
BLOCK = 128  # rows of a partial sum


class Ieee:
    """f32, rounded to nearest. rsqrt may be off by `rsqrt_ulps`, as on a GPU."""

    def __init__(self, rsqrt_ulps):
        self.rng, self.rsqrt_ulps = np.random.default_rng(1), rsqrt_ulps

    def add(self, a, b):
        return (a + b).astype(F)

    def sub(self, a, b):
        return (a - b).astype(F)

    def mul(self, a, b):
        return (a * b).astype(F)

    def rsqrt(self, a):
        if self.rsqrt_ulps == 0:
            return (F(1) / np.sqrt(a, dtype=F)).astype(F)
        return self.moved((1.0 / np.sqrt(a.astype(np.float64))).astype(F), self.rsqrt_ulps)

    def moved(self, values, ulps):
        """Moves each value by a random number of ulps, at most `ulps`."""
        steps = self.rng.integers(-ulps, ulps + 1, size=values.shape)
        for step in range(1, ulps + 1):
            down = np.where(steps <= -step, np.nextafter(values, F(-np.inf)), values)
            values = np.where(steps >= step, np.nextafter(values, F(np.inf)), down).astype(F)
        return values


class Wgsl(Ieee):
    """Every operation rounds to either neighbour, and subnormals become zero."""

    def __init__(self):
        super().__init__(1)

    def neighbour(self, exact):
        nearest = exact.astype(F)
        wide = nearest.astype(np.float64)
        other = np.where(wide > exact, np.nextafter(nearest, F(-np.inf)), nearest)
        other = np.where(wide < exact, np.nextafter(nearest, F(np.inf)), other)
        picked = np.where(self.rng.random(exact.shape) < 0.5, nearest, other).astype(F)
        return np.where(np.abs(picked) < F(2.0 ** -126), F(0), picked).astype(F)

    def add(self, a, b):
        return self.neighbour(np.asarray(a, np.float64) + np.asarray(b, np.float64))

    def sub(self, a, b):
        return self.neighbour(np.asarray(a, np.float64) - np.asarray(b, np.float64))

    def mul(self, a, b):
        return self.neighbour(np.asarray(a, np.float64) * np.asarray(b, np.float64))


def sum_cols(values, ops):
    """Strided running sums, then a tree of additions."""
    rows, cols = values.shape
    lanes = min(LANES, 1 << max(0, (cols - 1).bit_length()))
    steps = -(-cols // lanes)
    padded = np.zeros((rows, steps * lanes), F)
    padded[:, :cols] = values
    padded = padded.reshape(rows, steps, lanes)
    total = padded[:, 0].copy()
    for step in range(1, steps):
        total = ops.add(total, padded[:, step])
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = ops.add(total[:, :half], total[:, half:])
    return total


def sum_rows(values, ops):
    """Sums in order within each block of rows, then over the blocks."""
    rows, cols = values.shape
    blocks = -(-rows // BLOCK)
    padded = np.zeros((blocks * BLOCK, cols), F)
    padded[:rows] = values
    padded = padded.reshape(blocks, BLOCK, cols)
    partial = padded[:, 0].copy()
    for row in range(1, min(BLOCK, rows)):
        partial = ops.add(partial, padded[:, row])
    total = partial[0].copy()
    for block in range(1, blocks):
        total = ops.add(total, partial[block])
    return total


def truncated(values):
    """Truncates to bf16."""
    return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(F).astype(TYPES["bf16"])


def run(norm, t, eps, offset, dtype, parameters, ops, bug=None):
    """Returns the outputs of a call by name. `parameters` is the dtype of weight and bias."""
    t = {name: None if values is None else values.astype(F) for name, values in t.items()}
    store = TYPES[dtype]
    x = t["x"]
    if t["residual"] is not None:
        x = ops.add(x, t["residual"]).astype(store).astype(F)
    rows, cols = x.shape

    def average(values):
        return ops.mul(sum_cols(values, ops), F(1.0 / cols))

    is_layer = norm == "layer_norm"
    first = average(x) if is_layer else np.zeros((rows, 1), F)
    # Recomputed for the variance; in WGSL the rounding may differ from the first time.
    about = ops.sub(x, first) if is_layer else x
    squares = sum_cols(ops.mul(about, about), ops)
    mean, centred = first, x
    if is_layer:
        deviations = sum_cols(about, ops)
        missed = ops.mul(deviations, F(1.0 / cols))
        mean = ops.add(first, missed)
        squares = np.maximum(ops.sub(squares, ops.mul(deviations, missed)), F(0))
        centred = ops.sub(x, mean)
    var = ops.mul(squares, F(1.0 / cols))
    if bug == "eps_outside":
        rstd = (F(1) / (np.sqrt(var, dtype=F) + F(eps))).astype(F)
    else:
        rstd = ops.rsqrt(ops.add(var, F(eps)))
    weight = np.ones(cols, F) if t["weight"] is None else t["weight"]
    weight = ops.add(weight, F(offset)) if offset else weight
    x_hat = ops.mul(centred, rstd)
    y = ops.mul(x_hat, weight)
    y = y if t["bias"] is None else ops.add(y, t["bias"])

    wdy = ops.mul(t["dy"], weight)
    # The bug rounds too early, only for this average.
    averaged = wdy.astype(store).astype(F) if bug == "c_low" else wdy
    mean_wdy_xhat = average(ops.mul(averaged, x_hat))
    inner = ops.sub(wdy, average(wdy)) if is_layer else wdy
    dx = ops.mul(ops.sub(inner, ops.mul(x_hat, mean_wdy_xhat)), rstd)
    dx = dx if t["dresidual_out"] is None else ops.add(dx, t["dresidual_out"])
    terms = ops.mul(t["dy"], x_hat)
    if bug == "dw_lost_one":
        terms[rows // 2, cols // 2] = 0
    return dict(
        mean=mean[:, 0], rstd=rstd[:, 0], y=truncated(y) if bug == "rtz_store" else y.astype(store), dx=dx.astype(store),
        dweight=sum_rows(terms, ops).astype(TYPES[parameters]), dbias=sum_rows(t["dy"], ops).astype(TYPES[parameters]),
    )
