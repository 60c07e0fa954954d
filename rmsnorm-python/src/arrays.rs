//! Arrays of NumPy, CuPy and whatever else speaks DLPack, on the CPU or on CUDA.

use std::ffi::c_void;

use dlpark::DlpackFlags;
use dlpark::ffi::{DLDataTypeCode, DLDevice, DLDeviceType};
use dlpark::python::consumer::stream;
use dlpark::python::{DlpackStream, ImportRequest, ImportedDlpack, StreamArg};
use pyo3::exceptions::{PyBufferError, PyNotImplementedError, PyRuntimeError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use rmsnorm_core::{Access, CastOrder, DType, Direction, Error, Norm, NormSpec, RowLayout, Storage, Tensor};

use crate::call::Call;
use crate::foreign::{Foreign, Place, not_a_float};

/// CUDA's name for the legacy default stream, as DLPack and the driver have it.
const DEFAULT_STREAM: usize = 1;

/// The stream that a call goes to.
struct Ours(*mut c_void);

// SAFETY:
// - stream: the caller's of `run_arrays`, who keeps it alive; passed as CUDA's part of the protocol says.
unsafe impl DlpackStream for Ours {
    fn as_python_arg(&self, _: Python<'_>, device: DLDevice) -> PyResult<StreamArg> {
        Ok(if device.device_type == DLDeviceType::CPU { stream::none() } else { stream::cuda(self.0) })
    }
}

/// An error as Python has it.
fn to_python(error: Error) -> PyErr {
    let message = error.to_string();
    if matches!(error, Error::Unsupported { .. }) {
        PyNotImplementedError::new_err(message)
    } else if matches!(error, Error::Device { .. } | Error::Unavailable { .. }) {
        PyRuntimeError::new_err(message)
    } else {
        PyValueError::new_err(message)
    }
}

/// Runs a call on arrays: `tensors` has one for each name (`x`, `weight`, ..), with True where what are 16-bit integers are
/// bfloat16s, which NumPy has no way to hand over. Forward, or backward if there is a `dy`.
///
/// `stream` is a CUDA stream's address, by default the legacy default stream. The call is enqueued there, as are the producers'
/// waits; whoever uses an output on another stream waits for this one, and keeps all arrays alive until it is done.
#[pyfunction]
#[pyo3(signature = (norm, eps, weight_offset, cast_before_weight, tensors, stream=None))]
pub(crate) fn run_arrays(
    py: Python<'_>,
    norm: &str,
    eps: f32,
    weight_offset: f32,
    cast_before_weight: bool,
    tensors: &Bound<'_, PyDict>,
    stream: Option<usize>,
) -> PyResult<()> {
    let stream = std::ptr::with_exposed_provenance_mut(stream.unwrap_or(DEFAULT_STREAM));
    let norm = Norm::from_name(norm).ok_or_else(|| PyValueError::new_err("norm is rms_norm or layer_norm"))?;
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
    let shape = arrays.iter().find(|lent| lent.tensor == main).map(|lent| lent.foreign.layout);
    let RowLayout { rows, cols, .. } = shape.ok_or_else(|| PyTypeError::new_err(format!("{main} is missing")))?;
    let cast_order = if cast_before_weight { CastOrder::BeforeWeight } else { CastOrder::AtStore };
    let spec = NormSpec::new(norm, rows, cols, eps).weight_offset(weight_offset).cast_order(cast_order);
    let mut call = Call::new(direction, spec);
    for lent in &arrays {
        if lent.is_read_only && lent.tensor.access(direction) == Some(Access::Write) {
            return Err(PyBufferError::new_err(format!("{} is written, and the array is read-only", lent.tensor)));
        }
        call.with(lent.tensor, lent.foreign).map_err(to_python)?;
    }
    // Addresses, which may go to a thread without the interpreter's lock.
    let call = Detached(call, place);
    // SAFETY:
    // - memory: `arrays` holds what was lent until this returns, and the caller what the stream's work needs;
    // - sharing: as DLPack's consumers all, it is left to the caller that no other thread writes or, of outputs, uses the memory;
    // - stream: the caller's, by default one that always exists.
    py.detach(move || unsafe { call.run() }).map_err(to_python)
}

/// A call and its place, on their way to a stretch without the interpreter's lock.
struct Detached(Call, Place);

// SAFETY:
// - thread: it is used on the one that made it, while the lock is not held.
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

/// An array that is lent to a call.
struct Lent {
    tensor: Tensor,
    foreign: Foreign,
    device: DLDevice,
    is_read_only: bool,
    /// Ends the loan when dropped.
    _loan: ImportedDlpack,
}

impl Lent {
    fn import(tensor: Tensor, array: &Bound<'_, PyAny>, is_bf16: bool, stream: *mut c_void) -> PyResult<Self> {
        let request = ImportRequest::new(array.as_borrowed())?;
        let on_cuda = request.device().is_ok_and(|device| device.device_type == DLDeviceType::CUDA);
        let ours = Ours(stream);
        // No copy: of an output it would be the copy that is written.
        let loan = request.import(on_cuda.then_some(&ours as &dyn DlpackStream), None)?;
        let described = loan.validate().map_err(|error| PyBufferError::new_err(format!("{tensor}: {error}")))?;
        let dtype = described.dtype();
        let dtype = match (dtype.code, dtype.bits, dtype.lanes) {
            (DLDataTypeCode::FLOAT, 32, 1) => DType::F32,
            (DLDataTypeCode::FLOAT, 16, 1) => DType::F16,
            (DLDataTypeCode::BFLOAT, 16, 1) => DType::Bf16,
            (DLDataTypeCode::INT | DLDataTypeCode::UINT, 16, 1) if is_bf16 => DType::Bf16,
            (code, bits, _) => {
                let got = format!("DLPack's type {} of {bits} bits", code.0);
                return Err(to_python(not_a_float(tensor, &got)));
            }
        };
        let offset = usize::try_from(described.byte_offset()).unwrap_or(0);
        let data = described.data_ptr().cast_mut().cast::<u8>().wrapping_add(offset).cast();
        let strides = described.strides_or_compact().map_err(|error| PyBufferError::new_err(error.to_string()))?;
        let (storage, dims) = (Storage::Float(dtype), described.shape());
        // A scalar is a vector of one element: the statistics of an `x` that is one row.
        let foreign = if dims.is_empty() && !tensor.is_matrix() {
            Foreign::dense(data, storage, &[1])
        } else {
            Foreign::strided(data, storage, dims, &strides)
        };
        let foreign = foreign.ok_or_else(|| {
            let layout = format!("the shape {dims:?} and the strides {strides:?}");
            PyValueError::new_err(format!("{tensor}: no two strides lead from row to row, by {layout}"))
        })?;
        let is_read_only = loan.flags().contains(DlpackFlags::READ_ONLY);
        Ok(Lent { tensor, foreign, device: described.device(), is_read_only, _loan: loan })
    }
}

/// The place that all arrays are in.
fn one_place(arrays: &[Lent], stream: *mut c_void) -> PyResult<Place> {
    let device = arrays.first().map(|lent| lent.device).ok_or_else(|| PyTypeError::new_err("no array was given"))?;
    if let Some(other) = arrays.iter().find(|lent| lent.device != device) {
        return Err(PyValueError::new_err(format!("{} is on another device than {}", other.tensor, arrays[0].tensor)));
    }
    match device.device_type {
        DLDeviceType::CPU | DLDeviceType::CUDAHOST => Ok(Place::Cpu { threads: None }),
        DLDeviceType::CUDA | DLDeviceType::CUDAMANAGED => {
            Ok(Place::Cuda { ordinal: usize::try_from(device.device_id).unwrap_or(0), stream })
        }
        DLDeviceType(other) => Err(PyNotImplementedError::new_err(format!(
            "arrays are on the CPU or on CUDA, got DLPack's device {other}"
        ))),
    }
}
