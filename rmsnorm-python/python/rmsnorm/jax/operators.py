"""The primitives that JAX differentiates, batches and lowers: the norm, its tangent and its
gradients.

| operator | arrays | results |
|---|---|---|
| `norm` | x, residual, gate, weight, bias, next weight and bias | y, h, mean, rstd, next mean and rstd |
| `tangent` | h, gate, weight, bias, mean, rstd; tangents of x, residual, gate, weight, bias (linear in these) | tangents of y and h |
| `gradients` | dy, h, gate, weight, bias, mean, rstd, dh | dx, dgate, dweight, dbias, dresidual |

The derivative of `norm` is `tangent`, or two of them for two norms around a residual, and the transpose of `tangent` is `gradients`: reverse mode
runs one kernel forward and one backward, and keeps only h, the gate and the statistics. A bias is an array of these two only with a gate
after the norm, whose gradient needs it. `tangent` and
`gradients` are differentiated as jax.numpy formulas of h that recompute the statistics from h. The
statistics are therefore no independent variables, and their tangents are zero.

These are primitives because `jax.custom_vjp` has no forward mode and `jax.custom_jvp` has no custom
transpose.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from .._norm import Form
from . import calls, partition, reference
from .calls import filled, present

# `jax.extend.core` exports this class too, but imports all of Pallas: eight times the import time
# of this package.
_Primitive = type(jax.lax.add_p)


@dataclasses.dataclass(frozen=True)
class _Operator:
    """An operator without its arrays.

    are_there: for each array whether it is present.
    options: the other arguments of the role's function.
    levels: the `vmap` levels that cannot be folded into the rows, outermost first. Each has a flag
    per array: whether the array has the batch dimension, at the front.
    """

    role: str
    norm: Form
    is_split: bool
    are_there: tuple
    options: tuple = ()
    levels: tuple = ()

    def function(self, how, is_fresh=False):
        """A function from the present arrays to the present results. how: the module `calls`,
        `partition` or `reference`. is_fresh: the statistics are recomputed from h."""
        run, _, at = _ROLES[self.role]

        def of(*arrays):
            arrays = filled(arrays, self.are_there)
            if is_fresh:
                arrays[at + 4:at + 6] = reference.statistics(self.norm, *arrays[at:at + 3])
            return tuple(present(run(how, self.norm, *self.options, *arrays)))

        for level in reversed(self.levels):
            of = jax.vmap(of, tuple(0 if has else None for has in level))
        return of

    def bind(self, *arrays):
        """Binds the primitive; returns the present results."""
        if not any(isinstance(array, jax.core.Tracer) for array in arrays):
            with jax.disable_jit(False):
                return list(_compiled(self)(*arrays))
        # The size of a kernel's workspace cannot be symbolic.
        is_symbolic = any(not isinstance(size, int) for array in arrays for size in array.shape)
        # A batch whose members have separate weights is not split over devices.
        how = reference if is_symbolic else partition if self.is_split and not self.levels else calls
        return _PRIMITIVES[self.role].bind(*arrays, operator=self, call=_traced(self, how)(*arrays))


@functools.lru_cache(512)
def _traced(operator, how):
    """The traced function of an operator. Cached, so that JAX traces it once per argument types."""
    return jax.make_jaxpr(operator.function(how))


@functools.lru_cache(128)
def _compiled(operator):
    return jax.jit(operator.bind)


def _operator(role, norm, is_split, options, arrays):
    """(the operator for these arrays, the arrays that are not None)."""
    return _Operator(role, norm, is_split, tuple(array is not None for array in arrays), options), present(arrays)


def norm(norm, is_split, *arrays):
    """The results of `calls.forward`."""
    operator, given = _operator("norm", norm, is_split, (), arrays)
    return filled(operator.bind(*given), calls.results_of(norm, arrays[1] is not None))


def _run_norm(how, norm, *arrays):
    return how.forward(norm, *arrays)


def _run_tangent(how, norm, dtype, has_dh, *arrays):
    dy, dh = reference.tangent(norm, how.backward, dtype, *arrays)
    return dy, dh if has_dh else None


def _run_gradients(how, norm, needs, dtypes, *arrays):
    return how.backward(norm, *arrays, needs=needs, dtypes=dtypes)


# {role: (function, the arrays that have one value per column, the index of h)}. The gate, the weight, the bias, mean and rstd follow h.
_ROLES = {
    "norm": (_run_norm, (3, 4, 5, 6), None),
    "tangent": (_run_tangent, (2, 3, 9, 10), 0),
    "gradients": (_run_gradients, (3, 4), 1),
}


def _zero(value):
    return ad.Zero(calls.typeof(value).to_tangent_aval())


def _norm_jvp(primals, tangents, *, operator, call):
    varied = [index for index, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]
    if operator.levels:
        return _member_jvp(operator, primals, varied, [tangents[index] for index in varied])
    results, norm = operator.bind(*primals), operator.norm
    x, residual, gate, weight, bias, next_weight, _ = filled(primals, operator.are_there)
    _, h, mean, rstd, next_mean, next_rstd = filled(results, calls.results_of(norm, residual is not None))
    changes = filled([tangent if type(tangent) is not ad.Zero else None for tangent in tangents], operator.are_there)
    dx, dresidual, dgate, dweight, dbias, dnext_weight, dnext_bias = changes
    # The gradient of a gate after the norm is made of the norm.
    bias = bias if dgate is not None and not norm.gate_before else None

    def tangent(dtype, rows, weight, mean, rstd, dx, dresidual, dweight, dbias):
        """(dy, dh) of one norm; dh is None if the rows are no sum, or none of its terms changes."""
        has_dh = rows is h and (dx is not None or dresidual is not None)
        arrays = rows, gate, weight, bias, mean, rstd, dx, dresidual, dgate, dweight, dbias
        found, arrays = _operator("tangent", norm._replace(residual_after=False, has_next=False), operator.is_split, (dtype, has_dh), arrays)
        return filled(found.bind(*arrays), (True, has_dh))

    if norm.residual_after:
        dy, dh = None, dresidual
        if any(change is not None for change in (dx, dweight, dbias)):
            through, _ = tangent(jnp.dtype(jnp.float32), x, weight, mean, rstd, dx, None, dweight, dbias)
            dh = (through if dresidual is None else dresidual.astype(through.dtype) + through).astype(h.dtype)
        if norm.has_next:
            dy, arriving = tangent(x.dtype, h, next_weight, next_mean, next_rstd, None, dh, dnext_weight, dnext_bias)
            dh = dh if arriving is None else arriving
    else:
        dy, dh = tangent(norm.dtype_of_y(x.dtype), x if h is None else h, weight, mean, rstd, dx, dresidual, dweight, dbias)
    sums = [] if h is None else [_zero(h) if dh is None else dh]
    return results, [*present([dy]), *sums, *(_zero(value) for value in present((mean, rstd, next_mean, next_rstd)))]


def _member_jvp(operator, primals, varied, changes):
    """The derivative of a batch: the derivative of each member."""
    level, inner = operator.levels[0], dataclasses.replace(operator, levels=operator.levels[1:])

    def member(arrays, changes):
        def of(*some):
            return inner.bind(*_replaced(arrays, varied, some))

        return jax.jvp(of, [arrays[index] for index in varied], changes)

    axes = [0 if has else None for has in level]
    return jax.vmap(member, (axes, [axes[index] for index in varied]))(list(primals), changes)


def _replaced(arrays, at, by):
    arrays = list(arrays)
    for index, array in zip(at, by):
        arrays[index] = array
    return arrays


def _fresh_jvp(primals, tangents, *, operator, call):
    varied = [index for index, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]

    def of(*some):
        return operator.function(reference, is_fresh=True)(*_replaced(primals, varied, some))

    _, changes = jax.jvp(of, [primals[index] for index in varied], [tangents[index] for index in varied])
    return operator.bind(*primals), list(changes)


def _transpose(cotangents, *arrays, operator, call):
    wanted = [index for index, array in enumerate(arrays) if ad.is_undefined_primal(array)]
    dtypes = [array.aval.dtype if ad.is_undefined_primal(array) else None for array in arrays]
    dy, *dh = cotangents
    dh = [] if not dh or type(dh[0]) is ad.Zero else dh
    known = [None if index in wanted else array for index, array in enumerate(arrays)]
    found = _pulled(operator, wanted, dtypes, known, [ad.instantiate_zeros(dy), *dh])
    return _replaced([None] * len(arrays), wanted, found)


def _pulled(operator, wanted, dtypes, known, cotangents):
    """The gradients of the wanted arrays of a `tangent`."""
    if operator.levels:
        level, inner = operator.levels[0], dataclasses.replace(operator, levels=operator.levels[1:])
        member = functools.partial(_pulled, inner, wanted, dtypes)
        axes = [0 if has and index not in wanted else None for index, has in enumerate(level)]
        found = jax.vmap(member, (axes, 0))(known, cotangents)
        return [each if level[index] else each.sum(0) for index, each in zip(wanted, found)]
    h, *others, _, _, _, _, _ = filled(known, operator.are_there)
    needs = filled([index in wanted for index in range(len(known))], operator.are_there)[6:]
    parameter = present(filled(dtypes, operator.are_there)[9:])
    dy, dh = cotangents[0], cotangents[1] if len(cotangents) > 1 else None
    # The gradient of a sum after the norm may be wider than x, and that of a y is if the y is.
    dy = dy.astype(h.dtype) if dy.dtype.itemsize > h.dtype.itemsize and operator.norm.out_dtype is None else dy
    # A float32 residual gets its gradient in float32, not in the dtype of x.
    is_wider = bool(needs[1]) and h.dtype != dy.dtype
    options = (*map(bool, needs[2:]), is_wider), (parameter[0] if parameter else jnp.dtype(jnp.float32), h.dtype)
    gradients, arrays = _operator("gradients", operator.norm, operator.is_split, options, (dy, h, *others, dh))
    dx, *of_others, dresidual = filled(gradients.bind(*arrays), (True, *options[0]))
    each = dx, dresidual if is_wider else dx, *of_others
    return [gradient for gradient, is_needed in zip(each, needs) if is_needed]


def _batch(arrays, dims, *, operator, call):
    has = tuple(dim is not None for dim in dims)
    arrays = [array if dim is None else jnp.moveaxis(array, dim, 0) for array, dim in zip(arrays, dims)]
    of_columns = [index in _ROLES[operator.role][1] for index, is_there in enumerate(operator.are_there) if is_there]
    sums_rows = operator.role == "gradients" and any(operator.options[0][1:3])
    are_rows = not operator.levels and not sums_rows and all(is_batched != is_one for is_batched, is_one in zip(has, of_columns))
    results = (operator if are_rows else dataclasses.replace(operator, levels=(has, *operator.levels))).bind(*arrays)
    return results, [0] * len(results)


def _lower(context, *arrays, operator, call):
    # An export has no calls of the kernels: it can be loaded without this package, on every
    # platform.
    is_export = getattr(context.module_context.lowering_parameters, "for_export", False)
    function = operator.function(reference) if is_export else functools.partial(jax.core.eval_jaxpr, call.jaxpr, call.consts)
    return mlir.lower_fun(function, multiple_results=True)(context, *arrays)


def _primitive(role):
    primitive = _Primitive(f"rmsnorm_{role}")
    primitive.multiple_results = True
    primitive.def_impl(lambda *arrays, operator, call: operator.bind(*arrays))
    primitive.def_abstract_eval(lambda *kinds, operator, call: call.out_avals)
    ad.primitive_jvps[primitive] = _norm_jvp if role == "norm" else _fresh_jvp
    batching.primitive_batchers[primitive] = _batch
    mlir.register_lowering(primitive, _lower)
    return primitive


_PRIMITIVES = {role: _primitive(role) for role in _ROLES}
ad.primitive_transposes[_PRIMITIVES["tangent"]] = _transpose
