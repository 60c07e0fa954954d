//! Handlers of XLA's foreign function interface, which `jax.ffi` calls: one for each direction, for every norm and set of tensors.
//!
//! | here | role |
//! |---|---|
//! | `api` | the C header's structs |
//! | `frame` | what a call frame holds |

mod api;
mod frame;

use std::collections::HashSet;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::{LazyLock, PoisonError, RwLock};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use rmsnorm_core::cpu::CpuBackend;
use rmsnorm_core::{
    CastOrder, DType, DTypes, Direction, Error, Norm, NormSpec, Problem, RowLayout, Tensor, TensorShape,
};

use crate::call::Call;
use crate::device;
use crate::foreign::{Place, python_name, shape_of};
pub(crate) use api::xla_layouts;
use frame::{Array, Frame, invalid};

/// The tensors of a call and how many dimensions each has of its own: those before are of `vmap`.
struct Named<'a> {
    tensor: Tensor,
    array: Array<'a>,
    batch: &'a [i64],
    own: &'a [i64],
}

/// Pairs arrays with the names that an attribute lists, separated by commas.
fn named<'a>(names: &str, arrays: Vec<Array<'a>>, rank: usize) -> Result<Vec<Named<'a>>, Error> {
    let names: Vec<&str> = names.split(',').collect();
    if names.len() != arrays.len() {
        return Err(invalid("tensors", format!("{} are named, and {} came", names.len(), arrays.len())));
    }
    let named = |(name, array): (&str, Array<'a>)| {
        let tensor =
            Tensor::from_name(name).ok_or_else(|| invalid("tensors", format!("there is none named {name}")))?;
        let own = match tensor.shape() {
            TensorShape::Matrix => rank,
            TensorShape::Rows => rank - 1,
            TensorShape::Cols | TensorShape::Workspace => 1,
            TensorShape::Transposed | TensorShape::One | TensorShape::Scales | TensorShape::ScalesColumnwise => {
                return Err(invalid(tensor.name(), "there are no codes here"));
            }
        };
        let dims = array.dims();
        let at = dims.len().checked_sub(own).ok_or_else(|| {
            invalid(tensor.name(), format!("expected at least {own} dimensions, got the shape {dims:?}"))
        })?;
        Ok(Named { tensor, array, batch: &dims[..at], own: &dims[at..] })
    };
    names.into_iter().zip(arrays).map(named).collect()
}

/// How many there are of what has these dimensions.
fn count(dims: &[i64]) -> usize {
    dims.iter().map(|&dim| usize::try_from(dim).unwrap_or(0)).product()
}

/// The calls that a frame asks for: one, or one for each member of a batch whose members do not share all vectors.
fn calls(frame: &Frame<'_>, direction: Direction) -> Result<Vec<Call>, Error> {
    let norm = Norm::from_name(frame.string("norm")?).ok_or_else(|| invalid("norm", "it is rms_norm or layer_norm"))?;
    let rank = usize::try_from(frame.integer("rank")?).ok().filter(|rank| *rank > 0);
    let rank = rank.ok_or_else(|| invalid("rank", "x has at least one dimension"))?;
    let mut tensors = named(frame.string("inputs")?, frame.args(), rank)?;
    let outputs = named(frame.string("outputs")?, frame.results(), rank)?;
    let main = outputs.first().map(|first| (first.batch, first.own));
    let (batch, own) = main.ok_or(Error::Missing { arg: "outputs", why: "a call has some" })?;
    tensors.extend(outputs);

    // `vmap` puts as many dimensions before every tensor; one that all members share has 1 there.
    for Named { tensor, batch: theirs, own: dims, .. } in &tensors {
        let go_together =
            theirs.len() == batch.len() && theirs.iter().zip(batch).all(|(one, all)| *one == 1 || one == all);
        let expected = shape_of(*tensor, own).unwrap_or(dims);
        if !go_together || *dims != expected {
            let rule = format!("expected the shape {expected:?} in a batch of {batch:?}, got {dims:?} of {theirs:?}");
            return Err(invalid(tensor.name(), rule));
        }
    }
    let cols = count(&own[rank - 1..]);
    let rows = count(&own[..rank - 1]);
    // Members that share what belongs to columns and have all else of their own are so many more rows.
    let is_of_columns = |tensor: Tensor| matches!(tensor.shape(), TensorShape::Cols | TensorShape::Workspace);
    let is_one = |named: &Named<'_>| {
        if is_of_columns(named.tensor) { count(named.batch) == 1 } else { named.batch == batch }
    };
    let (members, rows) = if tensors.iter().all(is_one) { (1, count(batch) * rows) } else { (count(batch), rows) };

    let cast_order = match direction {
        Direction::Forward if frame.flag("cast_before_weight")? => CastOrder::BeforeWeight,
        Direction::Forward | Direction::Backward | Direction::QuantizedForward => CastOrder::AtStore,
    };
    let spec = NormSpec::new(norm, rows, cols, frame.float("eps")?).weight_offset(frame.float("weight_offset")?);
    let call = |member: usize| {
        let mut call = Call::new(direction, spec.cast_order(cast_order));
        for Named { tensor, array, batch: theirs, own } in &tensors {
            let layout = if tensor.is_matrix() {
                RowLayout::dense(&[rows, cols])
            } else {
                RowLayout::dense(&[if is_of_columns(*tensor) { count(own) } else { rows }])
            };
            let layout = layout.ok_or_else(|| invalid(tensor.name(), "it exceeds the address space"))?;
            call.with(*tensor, array.part(*tensor, place_in(theirs, batch, member), layout)?)?;
        }
        Ok(call)
    };
    (0..members).map(call).collect()
}

/// Where a member of a batch is among those that a tensor has of its own.
fn place_in(theirs: &[i64], batch: &[i64], member: usize) -> usize {
    let (mut rest, mut step, mut place) = (member, 1, 0);
    for (&own, &all) in theirs.iter().zip(batch).rev() {
        let (own, all) = (own.max(1) as usize, all.max(1) as usize);
        place += if own == 1 { 0 } else { rest % all * step };
        step *= own;
        rest /= all;
    }
    place
}

fn run(frame: &Frame<'_>, direction: Direction, is_cuda: bool) -> Result<(), Error> {
    if is_cuda && frame.stage() == api::STAGE_INITIALIZE {
        return initialize(frame, direction);
    }
    if frame.stage() == api::STAGE_EXECUTE {
        let place = if is_cuda { frame.cuda()? } else { Place::Cpu { threads: None } };
        for call in calls(frame, direction)? {
            // SAFETY:
            // - memory: XLA's buffers, as large as their dimensions say, there for the call and for the work of its stream;
            // - sharing: XLA gives a call its results, and orders all else by the stream;
            // - stream: XLA's, of the device's primary context.
            unsafe { call.run(place)? };
        }
    }
    Ok(())
}

/// Compiles kernels before the program runs, and before it is captured into a graph. XLA asks before every execution, which must not
/// cost what a call does: a call that was prepared is known by its place. Where another program has come to that place since, its
/// kernels are compiled when they are executed, which a capture allows.
fn initialize(frame: &Frame<'_>, direction: Direction) -> Result<(), Error> {
    static PREPARED: LazyLock<RwLock<HashSet<(usize, usize)>>> = LazyLock::new(RwLock::default);
    let key = (frame.ordinal()?, frame.call_id());
    if PREPARED.read().unwrap_or_else(PoisonError::into_inner).contains(&key) {
        return Ok(());
    }
    if let Some(call) = calls(frame, direction)?.first() {
        device::prepare(key.0, call)?;
    }
    PREPARED.write().unwrap_or_else(PoisonError::into_inner).insert(key);
    Ok(())
}

/// What XLA calls. Null means done.
///
/// # Safety
/// - Frame: it is one of XLA's.
unsafe fn handle(frame: *const api::CallFrame, direction: Direction, is_cuda: bool) -> *mut c_void {
    // SAFETY:
    // - frame: the caller's promise.
    let frame = unsafe { Frame::new(frame) };
    if frame.answers_metadata() {
        return null_mut();
    }
    let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run(&frame, direction, is_cuda)));
    let error = match done {
        Ok(Ok(())) => return null_mut(),
        Ok(Err(error)) => error,
        Err(_) => return frame.error(api::INTERNAL, "rmsnorm panicked, which is a bug in rmsnorm"),
    };
    let code = if matches!(error, Error::Unsupported { .. }) {
        api::UNIMPLEMENTED
    } else if matches!(error, Error::Device { .. } | Error::Unavailable { .. }) {
        api::INTERNAL
    } else {
        api::INVALID_ARGUMENT
    };
    frame.error(code, &error.to_string())
}

/// Declares a handler for each direction and platform.
macro_rules! handlers {
    ($($name:ident: $direction:ident as $target:literal on $platform:literal;)*) => {
        $(
            unsafe extern "C" fn $name(frame: *mut api::CallFrame) -> *mut c_void {
                // SAFETY:
                // - frame: only XLA calls this.
                unsafe { handle(frame, Direction::$direction, $platform == "CUDA") }
            }
        )*

        /// {(target, platform): capsule}, for `jax.ffi.register_ffi_target`.
        #[pyfunction]
        pub(crate) fn xla_handlers(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
            let handlers = PyDict::new(py);
            $(
                // SAFETY:
                // - address: of a function, which lives as long as the process; a capsule without a name is what JAX takes.
                let capsule = unsafe {
                    let capsule = pyo3::ffi::PyCapsule_New($name as *mut c_void, std::ptr::null(), None);
                    Bound::from_owned_ptr_or_err(py, capsule)?
                };
                handlers.set_item(($target, $platform), capsule)?;
            )*
            Ok(handlers)
        }
    };
}

handlers! {
    forward_cpu: Forward as "rmsnorm_forward" on "cpu";
    backward_cpu: Backward as "rmsnorm_backward" on "cpu";
    forward_cuda: Forward as "rmsnorm_forward" on "CUDA";
    backward_cuda: Backward as "rmsnorm_backward" on "CUDA";
}

/// The f32 elements of workspace of a backward call, on the CPU or on any CUDA device: no device is asked, as a program may be
/// lowered where there is none. `tensors` are names separated by commas, `dtypes` those of activations, weight and residual stream.
#[pyfunction]
pub(crate) fn xla_workspace_len(
    is_cuda: bool,
    norm: &str,
    rows: usize,
    cols: usize,
    tensors: &str,
    dtypes: (String, String, String),
) -> PyResult<usize> {
    let refuse = |what: &str| PyValueError::new_err(format!("rmsnorm knows no {what}"));
    let norm = Norm::from_name(norm).ok_or_else(|| refuse(norm))?;
    let dtype =
        |name: &str| DType::ALL.into_iter().find(|&dtype| python_name(dtype) == name).ok_or_else(|| refuse(name));
    let dtypes = DTypes { activation: dtype(&dtypes.0)?, weight: dtype(&dtypes.1)?, residual: dtype(&dtypes.2)? };
    let tensors: Option<Vec<Tensor>> = tensors.split(',').map(Tensor::from_name).collect();
    let tensors = tensors.ok_or_else(|| refuse("such tensor"))?;
    let problem = Problem { dtypes, ..Problem::backward(norm, rows, cols, dtypes.activation, &tensors[..]) };
    Ok(if is_cuda {
        rmsnorm_core::cuda::workspace_len_bound(&problem)
    } else {
        CpuBackend::new().workspace_len(&problem)
    })
}
