//! Arrays of NumPy, CuPy and other libraries that support DLPack, on the CPU or on CUDA.

use std::borrow::Cow;
use std::ffi::c_void;

use dlpark::DlpackFlags;
use dlpark::ffi::{DLDataTypeCode, DLDevice, DLDeviceType};
use dlpark::python::consumer::stream;
use dlpark::python::{DlpackStream, ImportRequest, ImportedDlpack, StreamArg};
use pyo3::exceptions::{PyBufferError, PyNotImplementedError, PyRuntimeError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use rmsnorm_core::{
    Access, DType, Direction, Error, NormSpec, ResidualPlacement, Role, RowLayout, Slot, Storage, Tensor,
};

use crate::call::{Call, gated, kind};
use crate::foreign::{Foreign, Place, python_name, shape_of};

/// The legacy default stream, in DLPack and in the CUDA driver.
const DEFAULT_STREAM: usize = 1;

/// The stream that a call is enqueued on.
struct Ours(*mut c_void);

// SAFETY:
// - stream: the caller's of `run_arrays`, who keeps it alive; passed as CUDA's part of the protocol says.
unsafe impl DlpackStream for Ours {
    fn as_python_arg(&self, _: Python<'_>, device: DLDevice) -> PyResult<StreamArg> {
        Ok(if device.device_type == DLDeviceType::CPU { stream::none() } else { stream::cuda(self.0) })
    }
}

/// The Python exception of an error.
fn to_python(error: Error) -> PyErr {
    let message = error.to_string();
    match error {
        Error::Overlap { output, other } => {
            let can = ["y", "residual_out"].contains(&output);
            let in_place = if can { "; in place, y is x and residual_out is residual" } else { "" };
            let rule = format!("{output} shares memory with {other}: pass a separate array for {output}");
            PyValueError::new_err(format!("{rule}{in_place}"))
        }
        Error::InvalidEps { .. } => {
            PyValueError::new_err(format!("{message}: with a negative eps, small rows have no real square root"))
        }
        Error::EmptyRow => {
            let rule = "the last dimension must have at least 1 element, got 0";
            PyValueError::new_err(format!("x: {rule}: an empty row has no mean"))
        }
        Error::Missing { .. } | Error::Unexpected { .. } => PyTypeError::new_err(message),
        Error::Unsupported { .. } => PyNotImplementedError::new_err(message),
        Error::Device { .. } | Error::Unavailable { .. } => PyRuntimeError::new_err(message),
        Error::InvalidWeightOffset { .. }
        | Error::Stride { .. }
        | Error::Length { .. }
        | Error::TooLarge { .. }
        | Error::InvalidArgument { .. }
        | _ => PyValueError::new_err(message),
    }
}

/// The error for an array that its library cannot export, with the argument's name.
fn not_lent(py: Python<'_>, tensor: Tensor, error: &PyErr) -> PyErr {
    let reason = error.value(py).to_string();
    let reason = reason.lines().next().unwrap_or_default();
    let message =
        format!("{tensor} cannot be exported by DLPack: {reason}; pass a plain array with data, such as a copy");
    if error.is_instance_of::<PyBufferError>(py) {
        PyBufferError::new_err(message)
    } else {
        PyTypeError::new_err(message)
    }
}

/// A shape as Python writes it.
fn tuple(dims: &[i64]) -> String {
    match dims {
        [one] => format!("({one},)"),
        several => format!("({})", several.iter().map(i64::to_string).collect::<Vec<_>>().join(", ")),
    }
}

/// Runs a call on arrays: forward, or backward if there is a `dy`.
///
/// `options`: eps, weight_offset, the cast order and residual_after.
/// `pieces`: the gate's activation, whether it is before the norm, and the groups of columns.
/// `tensors` maps names (`x`, `weight`, ..) to (array, is bfloat16). The flag marks 16-bit integer
/// arrays that hold bfloat16, which NumPy cannot export otherwise.
/// `stream` is the address of a CUDA stream, by default the legacy default stream. The call and the
/// waits for the arrays' producers are enqueued there. The caller orders other streams after it and
/// keeps all arrays alive until the call is done.
#[pyfunction]
#[pyo3(signature = (norm, options, pieces, tensors, stream=None))]
pub(crate) fn run_arrays(
    py: Python<'_>,
    norm: &str,
    options: (f32, f32, &str, bool),
    pieces: (Option<&str>, bool, usize),
    tensors: &Bound<'_, PyDict>,
    stream: Option<usize>,
) -> PyResult<()> {
    let stream = std::ptr::with_exposed_provenance_mut(stream.unwrap_or(DEFAULT_STREAM));
    let direction = if tensors.contains("dy")? { Direction::Backward } else { Direction::Forward };
    let mut arrays = Vec::with_capacity(tensors.len());
    for (name, value) in tensors {
        let name: String = name.extract()?;
        let (array, is_bf16): (Bound<'_, PyAny>, bool) = value.extract()?;
        let tensor = Tensor::from_name(&name).filter(|tensor| tensor.access(direction).is_some());
        let tensor =
            tensor.ok_or_else(|| PyTypeError::new_err(format!("a {} call has no {name}", direction.name())))?;
        arrays.push(Lent::import(tensor, &array, is_bf16, stream)?);
    }
    let place = one_place(&arrays, stream)?;
    let main = if direction == Direction::Backward { Tensor::Dy } else { Tensor::X };
    let found = arrays.iter().find(|lent| lent.tensor == main);
    let found = found.ok_or_else(|| PyTypeError::new_err(format!("{main} is missing: every call needs it")))?;
    let RowLayout { rows, cols, .. } = found.foreign.layout;
    let (eps, weight_offset, cast_order, residual_after) = options;
    let (norm, cast_order) = kind(norm, cast_order).map_err(to_python)?;
    let spec = NormSpec::new(norm, rows, cols, eps).weight_offset(weight_offset).cast_order(cast_order);
    let spec = if residual_after { spec.residual_after() } else { spec };
    let (activation, gate_before, groups) = pieces;
    let spec = activation.map_or(Ok(spec), |activation| gated(spec, activation, gate_before));
    let spec = spec.map_err(to_python)?.groups(groups);
    let mut call = Call::new(direction, spec);
    call.y_dtype = y_dtype(&call, &arrays);
    for lent in &arrays {
        if lent.is_read_only && lent.tensor.access(direction) == Some(Access::Write) {
            let rule = "is an output, and the array is read-only: pass a writable array";
            return Err(PyBufferError::new_err(format!("{} {rule}", lent.tensor)));
        }
        lent.check_shape(main, &found.dims, groups)?;
        call.with(lent.tensor, lent.foreign).map_err(to_python)?;
    }
    arrays.iter().try_for_each(|lent| lent.check_dtype(&call))?;
    if direction == Direction::Forward {
        work_in_place(&mut call)?;
    }
    // The call consists of addresses, so it can run without the interpreter's lock.
    let call = Detached(call, place);
    // SAFETY:
    // - memory: `arrays` holds the exported memory until this returns, the caller holds it until
    //   the stream's work is done;
    // - sharing: as for all consumers of DLPack, the caller ensures that no other thread writes an
    //   input or uses an output;
    // - stream: the caller's, by default one that always exists.
    py.detach(move || unsafe { call.run() }).map_err(to_python)
}

/// The dtype of `y` and `dy` if `x` and `dx` have another one, which a call with nothing that is added to
/// or multiplied with `x` may have.
fn y_dtype(call: &Call, arrays: &[Lent]) -> Option<DType> {
    let dtype = |tensor| arrays.iter().find(|lent| lent.tensor == tensor).map(|lent| lent.dtype);
    let is_gated = call.spec.gate.is_some_and(|gate| gate.slot == Slot::Before);
    if is_gated || call.spec.cast_order.is_weight_first() || call.spec.residual_placement == ResidualPlacement::After {
        return None;
    }
    let (y, x, added) = match call.direction {
        Direction::Forward | Direction::QuantizedForward => {
            (Tensor::Y, Tensor::X, [Tensor::Residual, Tensor::ResidualOut])
        }
        Direction::Backward => (Tensor::Dy, Tensor::Dx, [Tensor::Dresidual; 2]),
    };
    let (y, x) = (dtype(y)?, dtype(x)?);
    (y != x && added.into_iter().all(|tensor| dtype(tensor).is_none())).then_some(y)
}

/// Makes the call in place if an output has the address and layout of its input.
fn work_in_place(call: &mut Call) -> PyResult<()> {
    let lies_at = |call: &Call, output, input| match (call.tensor(output), call.tensor(input)) {
        (Some(output), Some(input)) => output.layout.span() > 0 && output.lies_at(input),
        _ => false,
    };
    let (y, sum) = (lies_at(call, Tensor::Y, Tensor::X), lies_at(call, Tensor::ResidualOut, Tensor::Residual));
    if call.spec.residual_placement == ResidualPlacement::After {
        if y {
            let rule = "with residual_after, x is not overwritten: pass a separate array for y";
            return Err(PyValueError::new_err(format!("y is x; {rule}")));
        }
        if sum {
            call.without(Tensor::Residual);
        }
        return Ok(());
    }
    if call.tensor(Tensor::Residual).is_some() && y != sum {
        let (is, is_not) =
            if y { ("y is x", "residual_out is not") } else { ("residual_out is residual", "y is not x") };
        let rule = format!("in place both are overwritten, y=x and residual_out=residual; {is} and {is_not}");
        return Err(PyValueError::new_err(format!("residual_out: {rule}: pass both, or two separate outputs")));
    }
    if y {
        call.without(Tensor::X);
        call.without(Tensor::Residual);
    }
    Ok(())
}

/// A call and its place, used while the interpreter's lock is released.
struct Detached(Call, Place);

// SAFETY:
// - thread: it is used on the thread that made it, while the lock is not held.
unsafe impl Send for Detached {}

impl Detached {
    /// # Safety
    /// As [`Call::run`].
    unsafe fn run(self) -> Result<(), Error> {
        // SAFETY:
        // - all: the caller's promises.
        unsafe { self.0.run(self.1) }
    }
}

/// An array that a call has imported with DLPack.
struct Lent {
    tensor: Tensor,
    foreign: Foreign,
    dims: Vec<i64>,
    dtype: DType,
    device: DLDevice,
    is_read_only: bool,
    /// Releases the array when dropped.
    _loan: ImportedDlpack,
}

impl Lent {
    fn import(tensor: Tensor, array: &Bound<'_, PyAny>, is_bf16: bool, stream: *mut c_void) -> PyResult<Self> {
        let py = array.py();
        let request = ImportRequest::new(array.as_borrowed()).map_err(|error| not_lent(py, tensor, &error))?;
        let on_cuda = request.device().is_ok_and(|device| device.device_type == DLDeviceType::CUDA);
        let ours = Ours(stream);
        // Without copying: a result would be written to the copy of an output.
        let loan = request.import(on_cuda.then_some(&ours as &dyn DlpackStream), None);
        let loan = loan.map_err(|error| not_lent(py, tensor, &error))?;
        let described = loan.validate().map_err(|error| PyBufferError::new_err(format!("{tensor}: {error}")))?;
        let dtype = described.dtype();
        let dtype = match (dtype.code, dtype.bits, dtype.lanes) {
            (DLDataTypeCode::FLOAT, 32, 1) => DType::F32,
            (DLDataTypeCode::FLOAT, 16, 1) => DType::F16,
            (DLDataTypeCode::BFLOAT, 16, 1) => DType::Bf16,
            (DLDataTypeCode::INT | DLDataTypeCode::UINT, 16, 1) if is_bf16 => DType::Bf16,
            (code, bits, _) => {
                let kinds = ["int", "uint", "float", "opaque", "bfloat", "complex", "bool"];
                let kind = kinds.get(usize::from(code.0)).unwrap_or(&"another type of ");
                let rule = format!("{tensor} must be float32, float16 or bfloat16, got {kind}{bits}");
                return Err(PyTypeError::new_err(format!("{rule}: convert it first")));
            }
        };
        let offset = usize::try_from(described.byte_offset()).unwrap_or(0);
        let data = described.data_ptr().cast_mut().cast::<u8>().wrapping_add(offset).cast();
        let strides = described.strides_or_compact();
        let strides = strides.map_err(|error| PyBufferError::new_err(format!("{tensor}: {error}")))?;
        let (storage, dims) = (Storage::Float(dtype), described.shape());
        if dims.is_empty() && tensor.is_matrix() {
            let rule = format!("{tensor} must have at least one dimension, got a scalar");
            return Err(PyValueError::new_err(format!("{rule}: a norm is over the last dimension")));
        }
        let foreign = Foreign::strided(tensor, data, storage, dims, &strides).ok_or_else(|| {
            let rule =
                "each row's elements must be contiguous, and the rows must have one stride, or two (row and group)";
            let layout = format!("got the shape {} with the strides {}, in elements", tuple(dims), tuple(&strides));
            PyValueError::new_err(format!(
                "{tensor}: {rule}; {layout}: pass a copy, such as numpy.ascontiguousarray({tensor})"
            ))
        })?;
        let is_read_only = loan.flags().contains(DlpackFlags::READ_ONLY);
        let (dims, device) = (dims.to_vec(), described.device());
        Ok(Lent { tensor, foreign, dims, dtype, device, is_read_only, _loan: loan })
    }

    /// Checks the shape. `dims`: the shape of `main`.
    ///
    /// # Errors
    /// `ValueError` if the shape does not match `dims`.
    fn check_shape(&self, main: Tensor, dims: &[i64], groups: usize) -> PyResult<()> {
        let expected = shape_of(self.tensor, dims, groups).unwrap_or(Cow::Borrowed(&self.dims));
        if self.dims == *expected {
            return Ok(());
        }
        let (tensor, expected, got) = (self.tensor, tuple(&expected), tuple(&self.dims));
        let rule = format!("{tensor}: expected the shape {expected}, got {got}");
        Err(PyValueError::new_err(format!("{rule}, since {main} has the shape {}", tuple(dims))))
    }

    /// Checks the dtype.
    ///
    /// # Errors
    /// `TypeError` if it differs from the other tensors of its role, or is neither the dtype of `x`
    /// (`dy` in backward, and `y` if its dtype is another one) nor float32.
    fn check_dtype(&self, call: &Call) -> PyResult<()> {
        let dtypes = call.dtypes().map_err(to_python)?;
        let main = match (call.direction, call.y_dtype) {
            (Direction::Backward, _) => Tensor::Dy,
            (Direction::Forward | Direction::QuantizedForward, Some(_)) => Tensor::Y,
            (Direction::Forward | Direction::QuantizedForward, None) => Tensor::X,
        };
        let stored = call.tensor_of(self.tensor);
        let expected = stored.storage(call.direction, dtypes, None).and_then(Storage::float).unwrap_or(self.dtype);
        let is_of_x = call.y_dtype.is_some() && stored.role(call.direction) == Role::Residual;
        let rule = if self.dtype != expected {
            let is_kept = call.y_dtype.is_none() && [Tensor::Y, Tensor::Dx].contains(&self.tensor);
            let why = format!(", as {main} is beside a residual, a gate before the norm or weight_first");
            format!("{}{}", python_name(expected), if is_kept { &why } else { "" })
        } else if [dtypes.activation, DType::F32].contains(&expected) || is_of_x && dtypes.activation == DType::F32 {
            return Ok(());
        } else if dtypes.activation == DType::F32 {
            format!("float32, as {main} is")
        } else {
            format!("float32 or, as {main} is, {}", python_name(dtypes.activation))
        };
        let (tensor, got) = (self.tensor, python_name(self.dtype));
        Err(PyTypeError::new_err(format!("{tensor} must be {rule}, got {got}: convert it first")))
    }
}

/// The place of all arrays.
fn one_place(arrays: &[Lent], stream: *mut c_void) -> PyResult<Place> {
    let device =
        arrays.first().map(|lent| lent.device).ok_or_else(|| PyTypeError::new_err("no array was given: pass x"))?;
    if let Some(other) = arrays.iter().find(|lent| lent.device != device) {
        let (first, tensor) = (arrays[0].tensor, other.tensor);
        let (here, there) = (device_name(device), device_name(other.device));
        let rule = format!("{tensor} must be on the device of {first}, {here}, got {there}");
        return Err(PyValueError::new_err(format!("{rule}: copy it there first")));
    }
    match device.device_type {
        DLDeviceType::CPU | DLDeviceType::CUDAHOST => Ok(Place::Cpu { threads: None }),
        DLDeviceType::CUDA | DLDeviceType::CUDAMANAGED => {
            Ok(Place::Cuda { ordinal: usize::try_from(device.device_id).unwrap_or(0), stream })
        }
        _ => {
            let rule = format!("arrays must be on the CPU or on CUDA, got {}", device_name(device));
            Err(PyNotImplementedError::new_err(format!("{rule}: copy them there first")))
        }
    }
}

/// The name and number of a device.
fn device_name(device: DLDevice) -> String {
    let name = match device.device_type {
        DLDeviceType::CPU => return "cpu".into(),
        DLDeviceType::CUDA => "cuda",
        DLDeviceType::CUDAHOST => "cuda_host",
        DLDeviceType::CUDAMANAGED => "cuda_managed",
        DLDeviceType(other) => return format!("DLPack's device {other}"),
    };
    format!("{name}:{}", device.device_id)
}
