"""Reference and error bounds of math.md, sections 1, 5 and 6, in extended precision. The Rust version is a port of this.

`np.longdouble` has 64 significant bits on x86. On platforms with 53 bits, results differ from the
committed ones in the last digits.
"""
import numpy as np

LD = np.longdouble
FORMATS = {"f32": (24, -126, 127), "f16": (11, -14, 15), "bf16": (8, -126, 127)}  # significant bits, smallest and largest exponent
TINY = 2.0 ** -126
LAMBDA = 6.0  # standard deviations


def round_to(x, dtype, mode="nearest"):
    """Rounds once to a value of the dtype: to nearest even, down or up."""
    bits, least, most = FORMATS[dtype]
    x = np.asarray(x, dtype=LD)
    finite = np.isfinite(x)
    values = np.where(finite, x, LD(0))
    _, exponent = np.frexp(values)
    # Exponent of the leading bit, at least that of the smallest normal value: gradual underflow.
    exponent = np.maximum(exponent - 1, least)
    scaled = np.ldexp(values, bits - 1 - exponent)
    rounded = {"nearest": np.rint, "down": np.floor, "up": np.ceil}[mode](scaled)
    rounded = np.ldexp(rounded, exponent - (bits - 1))
    largest = (LD(2) - LD(2) ** (1 - bits)) * LD(2) ** most
    if mode == "nearest":
        rounded = np.where(np.abs(rounded) > largest, np.copysign(LD(np.inf), rounded), rounded)
    elif mode == "down":
        rounded = np.where(rounded > largest, largest, np.where(rounded < -largest, -LD(np.inf), rounded))
    else:
        rounded = np.where(rounded < -largest, -largest, np.where(rounded > largest, LD(np.inf), rounded))
    return np.where(finite, rounded, x).astype(np.float64)


class Arithmetic:
    """The declared arithmetic of a backend: math.md, section 4."""

    def __init__(self, u=2.0 ** -24, rho=2.0, k=2.0, stores_nearest=True, flushes=False):
        self.u, self.rho, self.k, self.stores_nearest, self.flushes = u, rho * u, k, stores_nearest, flushes


def depth_cols(cols):
    of_lanes = -(-cols // 32)
    return min(max(cols - 1, 0), of_lanes + 16, 2 * int(np.ceil(np.sqrt(of_lanes))) + 80)


def depth_rows(rows):
    return min(max(rows - 1, 0), 2 * int(np.ceil(np.sqrt(rows))) + 64)


def sum_error(terms, axis, depth, u, mode):
    """S(t, D) of math.md, section 4: worst case or statistical."""
    worst = np.abs(terms).sum(axis=axis) * (depth * u / (1.0 - depth * u))
    if mode == "worst":
        return worst
    total = np.abs(terms.sum(axis=axis))
    norm = np.sqrt((terms * terms).sum(axis=axis))
    return np.minimum(worst, LAMBDA * u * np.sqrt(depth / 3.0) * (total + norm))


def reference(norm, t, eps, offset, dtype, mean=None, rstd=None):
    """Equations (1) to (12). `mean` and `rstd` replace the computed statistics."""
    t = {name: None if values is None else np.asarray(values, dtype=LD) for name, values in t.items()}
    x, rows, cols = t["x"], *t["x"].shape
    if t["residual"] is not None:
        x = np.asarray(round_to(x + t["residual"], dtype), dtype=LD)
    weight = t["weight"] + LD(offset) if t["weight"] is not None else np.ones(cols, LD)
    own_mean = x.mean(axis=1, keepdims=True) if norm == "layer_norm" else np.zeros((rows, 1), LD)
    mean = own_mean if mean is None else np.asarray(mean, dtype=LD).reshape(rows, 1)
    centred = x - mean
    var = (centred * centred).mean(axis=1, keepdims=True)
    rstd = 1 / np.sqrt(var + LD(eps)) if rstd is None else np.asarray(rstd, dtype=LD).reshape(rows, 1)
    x_hat = centred * rstd
    y = x_hat * weight + (t["bias"] if t["bias"] is not None else 0)
    wdy = t["dy"] * weight
    mean_wdy = wdy.mean(axis=1, keepdims=True) if norm == "layer_norm" else np.zeros((rows, 1), LD)
    mean_wdy_xhat = (wdy * x_hat).mean(axis=1, keepdims=True)
    dx_norm = rstd * (wdy - mean_wdy - x_hat * mean_wdy_xhat)
    return dict(
        h=x, mean=mean[:, 0], rstd=rstd[:, 0], var=var[:, 0], y=y, x_hat=x_hat, centred=centred, weight=weight, wdy=wdy,
        mean_wdy=mean_wdy, mean_wdy_xhat=mean_wdy_xhat, dx_norm=dx_norm, dy=t["dy"],
        dx=dx_norm + (t["dresidual_out"] if t["dresidual_out"] is not None else 0),
        dweight=(t["dy"] * x_hat).sum(axis=0), dbias=t["dy"].sum(axis=0),
    )


def bounds(norm, ref, eps, arithmetic, dtype, case, given=False):
    """Largest absolute errors before the rounding to the dtype: math.md, section 5."""
    centred, x_hat, weight, dy = ref["centred"], ref["x_hat"], ref["weight"], ref["dy"]
    mean, rstd, var = ref["mean"][:, None], ref["rstd"][:, None], ref["var"][:, None]
    wdy, mean_wdy, mean_wdy_xhat = ref["wdy"], ref["mean_wdy"], ref["mean_wdy_xhat"]
    rows, cols = x_hat.shape
    u, rho, is_layer = arithmetic.u, arithmetic.rho, norm == "layer_norm"
    mode = "worst" if given else case["mode"]
    k = 0.0 if cols & (cols - 1) == 0 else arithmetic.k
    o = 1.0 if case["offset"] else 0.0
    second_order = 1 + 2.0 ** -10

    depth = depth_cols(cols)

    def over_cols(terms):
        return sum_error(terms, 1, depth, u, mode)[:, None] / cols

    def over_rows(terms):
        return sum_error(terms, 0, depth_rows(rows), u, mode)

    def average(terms):
        return terms.mean(axis=1, keepdims=True)

    error = {}
    # 5.1. `r` is the largest relative error of rstd.
    e_mean = r = np.zeros((rows, 1), LD)
    if not given:
        if is_layer:
            # F of 5.4.
            lost = 3 * TINY if arithmetic.flushes else 0.0
            e_first = over_cols(ref["h"]) + k * u * np.abs(mean) + lost
            added = over_cols(centred)
            if mode == "statistical":
                worst = sum_error(centred, 1, depth, u, "worst")[:, None] / cols
                added = np.minimum(worst, added + u * np.sqrt(depth * average(centred * centred)))
            e_dev = added + average(np.abs(centred)) * u + (depth + 1) * u * e_first + lost
            before = e_dev + k * u * (e_first + e_dev)
            down, up = ("nearest", "nearest") if arithmetic.stores_nearest else ("down", "up")
            e_mean = np.maximum(mean - round_to(mean - before, "f32", down), round_to(mean + before, "f32", up) - mean)
            e_var = (over_cols(centred * centred) + var * (4 + k) * u
                     + (depth + 8 + 2 * k) * u * (e_first + e_dev) ** 2 + (2 * e_first + e_dev) * e_dev)
        else:
            q = 1 if dtype == "f32" else 0
            e_var = over_cols(centred * centred) + var * (q + k) * u
        e_var = e_var + TINY
        v = var + LD(eps)
        most = (v + e_var) * (1 + u)
        least = np.maximum(v - e_var, LD(eps)) * (1 - u)
        highest = np.where(least > 0, 1 / np.sqrt(np.where(least > 0, least, 1)), np.inf) * (1 + rho)
        lowest = 1 / np.sqrt(most) * (1 - rho)
        r = np.maximum(highest / rstd - 1, 1 - lowest / rstd)
        error["rstd"] = (r * rstd)[:, 0] * second_order
        if is_layer:
            error["mean"] = e_mean[:, 0] * second_order + TINY
    # 5.2.
    common = rstd * (1 + r) * e_mean
    local = (rstd * (1 + r) * u * np.abs(centred) if is_layer else 0) + np.abs(x_hat) * u
    e_x_hat = common + np.abs(x_hat) * r + local
    underflow = TINY * (1 + (1 + rstd) * (1 + np.abs(weight)))
    e_y = np.abs(weight) * e_x_hat + np.abs(x_hat * weight) * (1 + o) * u + (u * np.abs(ref["y"]) if case["bias"] else 0)
    error["y"] = e_y * second_order + underflow
    # 5.3.
    e_wdy = np.abs(wdy) * (1 + o) * u
    e_mean_wdy = over_cols(wdy) + average(e_wdy) + k * u * np.abs(mean_wdy) if is_layer else 0
    products = wdy * x_hat
    terms = np.abs(wdy) * (1 + r) * local + np.abs(products) * ((2 + o) * u)
    e_mean_wdy_xhat = (np.abs(mean_wdy_xhat) * r + np.abs(average(wdy)) * common + over_cols(products) + average(terms)
                       + k * u * np.abs(mean_wdy_xhat))
    inner = (e_wdy + e_mean_wdy + np.abs(x_hat) * e_mean_wdy_xhat + np.abs(mean_wdy_xhat) * e_x_hat
             + e_x_hat * e_mean_wdy_xhat + u * np.abs(x_hat * mean_wdy_xhat)
             + (u * (np.abs(wdy) + np.abs(mean_wdy)) if is_layer else 0)
             + u * np.abs(wdy - mean_wdy - x_hat * mean_wdy_xhat))
    e_dx = rstd * (1 + r) * inner + np.abs(ref["dx_norm"]) * (r + u)
    if case["dresidual_out"]:
        e_dx = e_dx + u * np.abs(ref["dx"])
    error["dx"] = e_dx * second_order + underflow * (1 + rstd)
    terms = dy * x_hat
    e_terms = (np.abs(dy) * e_x_hat).sum(axis=0) + u * np.abs(terms).sum(axis=0)
    if mode == "statistical":
        walk = LAMBDA * np.sqrt(((dy * e_x_hat) ** 2).sum(axis=0)) + LAMBDA * u * np.sqrt((terms * terms).sum(axis=0))
        e_terms = np.minimum(e_terms, rho * np.abs(terms.sum(axis=0)) + walk)
    error["dweight"] = (over_rows(terms) + e_terms) * second_order + TINY * rows
    error["dbias"] = over_rows(dy) * second_order + TINY * rows
    return error


def accept(got, ref, error, dtype, arithmetic):
    """Whether each value is in its acceptance interval: math.md, section 6."""
    got = np.asarray(got, dtype=np.float64)
    ref, error = np.asarray(ref, dtype=LD), np.asarray(error, dtype=LD)
    if dtype == "f32":
        accepted = np.abs(got.astype(LD) - ref) <= error
    else:
        down, up = ("nearest", "nearest") if arithmetic.stores_nearest else ("down", "up")
        accepted = (got >= round_to(ref - error, dtype, down)) & (got <= round_to(ref + error, dtype, up))
    if arithmetic.flushes:
        accepted |= (got == 0) & (np.abs(ref) - error < 2.0 ** FORMATS[dtype][1])
    return accepted
