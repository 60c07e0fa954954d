//! The operators `rmsnorm::*` of PyTorch's dispatcher, through libtorch's stable C interface. The
//! dispatcher calls the kernels without Python, and nothing of libtorch is linked.
//!
//! | module | role |
//! |---|---|
//! | `operator` | the operators as data |
//! | `shim` | libtorch's functions |
//! | `tensor` | PyTorch's tensors |
//! | `quantized` | types and layouts of codes and scales |

mod operator;
mod quantized;
mod shim;
mod tensor;

use std::borrow::Cow;
use std::ffi::CString;
use std::sync::OnceLock;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use rmsnorm_core::quant::ScaleKind;
use rmsnorm_core::{
    Activation, CastOrder, DType, Direction, Error, Norm, NormSpec, RowLayout, Storage, Tensor, TensorShape,
};

use crate::call::{Call, F32};
use crate::device;
use crate::foreign::{Foreign, Place, shape_of, sizes};
use operator::{Operator, Parameter, SCHEMAS, Y_DTYPES};
use shim::{Exception, Kernel, Shim, Value};
use tensor::{DeviceOf, Owned};

/// libtorch's functions, and the operators in the order of their schemas.
static TORCH: OnceLock<(Shim, Vec<Operator>)> = OnceLock::new();

/// The largest number of results of an operator.
const MOST_RESULTS: usize = 6;

/// The arguments of a call from the dispatcher. All are taken before any check, so that all are
/// released after an error.
struct Arguments<'s> {
    tensors: [Option<Owned<'s>>; Tensor::COUNT],
    eps: f64,
    weight_offset: f64,
    cast_order: i64,
    kind: i64,
    is_sigmoid: bool,
    gate_before: bool,
    groups: i64,
    y_dtype: i64,
    needed: [bool; Tensor::COUNT],
    codes_type: i64,
    scale_kind: i64,
}

impl<'s> Arguments<'s> {
    /// # Safety
    /// - Values: they are the stack of a call of this operator, whose tensors the kernel owns from
    ///   here.
    unsafe fn take(shim: &'s Shim, operator: &Operator, values: &[Value]) -> Self {
        let mut arguments = Arguments {
            tensors: [const { None }; Tensor::COUNT],
            eps: 0.0,
            weight_offset: 0.0,
            cast_order: 0,
            kind: operator.norm as i64,
            is_sigmoid: false,
            gate_before: false,
            groups: 1,
            y_dtype: 0,
            needed: [false; Tensor::COUNT],
            codes_type: 0,
            scale_kind: 0,
        };
        for (parameter, &value) in operator.parameters.iter().zip(values) {
            match *parameter {
                // SAFETY:
                // - value: of this kind, by the schema that is made from the same list.
                Parameter::Tensor(tensor) => unsafe {
                    arguments.tensors[tensor as usize] = Some(Owned::of_value(shim, value));
                },
                // SAFETY:
                // - value: as above.
                Parameter::Optional(tensor) => unsafe {
                    arguments.tensors[tensor as usize] = Owned::of_optional(shim, value);
                },
                Parameter::Eps => arguments.eps = f64::from_bits(value),
                Parameter::WeightOffset => arguments.weight_offset = f64::from_bits(value),
                // Only the lowest byte of a bool is defined.
                Parameter::CastBeforeWeight => {
                    let is_cast = value as u8 != 0;
                    arguments.cast_order = if is_cast { CastOrder::BeforeWeight } else { CastOrder::AtStore } as i64;
                }
                Parameter::Kind => arguments.kind = value.cast_signed(),
                Parameter::CastOrder => arguments.cast_order = value.cast_signed(),
                Parameter::YDtype => arguments.y_dtype = value.cast_signed(),
                Parameter::IsSigmoid => arguments.is_sigmoid = value as u8 != 0,
                Parameter::GateBefore => arguments.gate_before = value as u8 != 0,
                Parameter::Groups => arguments.groups = value.cast_signed(),
                Parameter::Need(tensor) => arguments.needed[tensor as usize] = value as u8 != 0,
                Parameter::CodeType => arguments.codes_type = value.cast_signed(),
                Parameter::ScaleKind => arguments.scale_kind = value.cast_signed(),
            }
        }
        arguments
    }

    fn tensor(&self, tensor: Tensor) -> Option<&Owned<'s>> {
        self.tensors[tensor as usize].as_ref()
    }

    /// `x`, or `dy` in backward. It determines the shape and the device of the call.
    fn main(&self, direction: Direction) -> Result<&Owned<'s>, Error> {
        let tensor = if direction == Direction::Backward { Tensor::Dy } else { Tensor::X };
        self.tensor(tensor).ok_or(Error::Missing { arg: tensor.name(), why: "every call needs it" })
    }

    fn spec(&self, operator: &Operator, rows: usize, cols: usize) -> Result<NormSpec, Error> {
        let norm = numbered("kind", &Norm::ALL, self.kind)?;
        let cast_order = numbered("cast_order", &CastOrder::ALL, self.cast_order)?;
        let spec = NormSpec::new(norm, rows, cols, self.eps as f32).weight_offset(self.weight_offset as f32);
        // Statistics are allocated before validation, and more groups than columns may not fit.
        let groups = usize::try_from(self.groups).ok().filter(|groups| (1..=cols.max(1)).contains(groups));
        let refuse = || Error::InvalidArgument {
            arg: "groups",
            rule: format!("expected at least 1 and at most the {cols} columns of a row, got {}", self.groups),
        };
        let spec = spec.cast_order(cast_order).groups(groups.ok_or_else(refuse)?);
        let spec = if operator.adds_to_residual { spec.residual_after() } else { spec };
        let activation = if self.is_sigmoid { Activation::Sigmoid } else { Activation::Silu };
        Ok(match (self.tensor(Tensor::Gate), self.gate_before) {
            (None, _) => spec,
            (Some(_), true) => spec.gate_before(activation),
            (Some(_), false) => spec.gate_after(activation),
        })
    }

    /// The dtype of `y` if `x` has another one. Backward has another one where `dresidual` stands for
    /// `dx`.
    fn y_dtype(&self, operator: &Operator, main: &Owned<'s>) -> Result<Option<DType>, Error> {
        let asked = numbered("y_dtype", &Y_DTYPES, self.y_dtype)?;
        match operator.direction {
            Direction::Forward => {
                let other = asked.filter(|_| asked != main.storage(Tensor::X).ok().and_then(Storage::float));
                if other.is_some() && self.tensor(Tensor::Residual).is_some() {
                    let rule = "a residual needs a y of the dtype of x: cast y after the call".into();
                    return Err(Error::Unsupported { rule });
                }
                Ok(other)
            }
            Direction::Backward if operator.parameters.contains(&Parameter::Need(Tensor::Dx)) => {
                let is_cast = !self.needed[Tensor::Dx as usize];
                Ok(if is_cast { main.storage(Tensor::Dy)?.float() } else { None })
            }
            Direction::Backward | Direction::QuantizedForward => Ok(None),
        }
    }

    /// Whether the call has the result. A result that is not needed has no elements. The statistics
    /// of a next norm are needed with its `y`.
    fn needs(&self, operator: &Operator, result: Tensor) -> bool {
        let flag = if matches!(result, Tensor::NextMean | Tensor::NextRstd) { Tensor::Y } else { result };
        let is_optional = operator.parameters.contains(&Parameter::Need(flag));
        let has_no_input = result == Tensor::ResidualOut && self.tensor(Tensor::Residual).is_none();
        let is_zero = result == Tensor::Mean && self.kind != Norm::Layer as i64;
        !(is_optional && !self.needed[flag as usize] || has_no_input || is_zero)
    }

    /// Adds the inputs to the call. An input whose rows need more than two strides is copied;
    /// `copies` owns the copies.
    fn give(&self, call: &mut Call, dims: &[i64], device: DeviceOf, copies: &mut Vec<Owned<'s>>) -> Result<(), Error> {
        for tensor in Tensor::ALL {
            let Some(owned) = self.tensor(tensor) else { continue };
            if owned.device()? != device {
                let rule = "expected a tensor on the device of the other tensors: move it there".into();
                return Err(Error::InvalidArgument { arg: tensor.name(), rule });
            }
            let got = owned.dims()?;
            let expected = shape_of(tensor, dims, call.spec.groups).unwrap_or(Cow::Borrowed(got));
            if got != &*expected {
                let rule = format!("expected the shape {expected:?}, got {got:?}");
                return Err(Error::InvalidArgument { arg: tensor.name(), rule });
            }
            // Strided vectors are copied, too.
            let (foreign, copy) = owned.rows(tensor)?;
            copies.extend(copy);
            call.with(tensor, foreign)?;
        }
        Ok(())
    }
}

/// Runs an operator. Its results are new tensors.
fn run(shim: &Shim, operator: &Operator, arguments: &Arguments<'_>) -> Result<[Option<Value>; MOST_RESULTS], Error> {
    let main = arguments.main(operator.direction)?;
    let (dims, device) = (main.dims()?, main.device()?);
    let arg = if operator.direction == Direction::Backward { "dy" } else { "x" };
    let rule = "expected at least one dimension";
    let refuse = || Error::InvalidArgument { arg, rule: format!("{rule}, got the shape {dims:?}") };
    let RowLayout { rows, cols, .. } = sizes(dims).and_then(RowLayout::dense).ok_or_else(refuse)?;
    let spec = arguments.spec(operator, rows, cols)?;
    let mut call = Call::new(operator.direction, spec);
    call.y_dtype = arguments.y_dtype(operator, main)?;
    let mut copies = Vec::new();
    arguments.give(&mut call, dims, device, &mut copies)?;
    if operator.direction == Direction::QuantizedForward {
        call.quant = Some(quantized::spec(arguments.codes_type, arguments.scale_kind, rows)?);
    }
    // Gradients of parameters have the parameters' dtype, or f32 without parameters.
    let dtypes = call.dtypes()?;
    let weight =
        arguments.tensor(Tensor::Weight).or(arguments.tensor(Tensor::Bias)).map_or(DType::F32, |_| dtypes.weight);
    let dtypes = rmsnorm_core::DTypes { weight, ..dtypes };
    call.check(dtypes)?;

    let mut results = [const { None }; MOST_RESULTS];
    for (result, &tensor) in results.iter_mut().zip(&operator.results) {
        let storage = tensor.storage(operator.direction, dtypes, call.quant.as_ref()).unwrap_or(F32);
        let made = if !arguments.needs(operator, tensor) {
            Owned::empty(shim, &[0], storage, device)?
        } else if let (Tensor::Scales, Some(quant)) = (tensor, &call.quant) {
            let made = quantized::scales(shim, quant, dims, (rows, cols), device)?;
            // A call of no rows has scales, too: a tensor of no elements.
            if let Some(len) = quant.scales_len(rows, cols)
                && quant.scale != ScaleKind::Given
            {
                let scales = Foreign { data: made.data()?, storage, layout: vector(len)? };
                call.with(tensor, scales)?;
            }
            made
        } else {
            let shape = shape_of(tensor, dims, spec.groups).unwrap_or(Cow::Borrowed(dims));
            let made = Owned::empty(shim, &shape, storage, device)?;
            let layout = if tensor.is_matrix() {
                RowLayout::dense(&[rows, cols]).ok_or_else(refuse)?
            } else {
                vector(if tensor.shape() == TensorShape::Cols { cols } else { rows.saturating_mul(spec.groups) })?
            };
            call.with(tensor, Foreign { data: made.data()?, storage, layout })?;
            made
        };
        *result = Some(made);
    }

    let place = shim.place(device)?;
    // PyTorch allocates the workspace: its statistics count it, its stream orders it, and CUDA
    // graphs can capture it.
    let len = match (operator.direction, place) {
        (Direction::Backward, Place::Cuda { ordinal, .. }) => device::cuda(ordinal)?.workspace_len(&call.problem()?),
        _ => 0,
    };
    let workspace = (len > 0).then(|| Owned::empty(shim, &[len as i64], F32, device)).transpose()?;
    if let Some(workspace) = &workspace {
        call.with(Tensor::Workspace, Foreign { data: workspace.data()?, storage: F32, layout: vector(len)? })?;
    }
    // SAFETY:
    // - memory: of tensors that are held until this returns; PyTorch's allocator then keeps it for
    //   the work of its stream;
    // - sharing: results are new; PyTorch orders the uses of arguments with its stream;
    // - stream: PyTorch's current stream, which it never destroys.
    unsafe { call.run(place)? };
    Ok(results.map(|made| made.map(Owned::into_value)))
}

/// The value of this number.
fn numbered<T: Copy>(arg: &'static str, values: &[T], number: i64) -> Result<T, Error> {
    let found = usize::try_from(number).ok().and_then(|number| values.get(number)).copied();
    let refuse = || Error::InvalidArgument { arg, rule: format!("expected 0 to {}, got {number}", values.len() - 1) };
    found.ok_or_else(refuse)
}

fn vector(len: usize) -> Result<RowLayout, Error> {
    RowLayout::dense(&[len]).ok_or(Error::EmptyRow)
}

/// Runs operator `index` for the dispatcher. Leaves the results on the stack, or returns the
/// exception to throw. Never unwinds.
///
/// # Safety
/// - Stack: it is the stack of a call of the operator.
#[inline(never)]
unsafe extern "C" fn kernel(index: usize, stack: *mut Value, inputs: u64) -> Exception {
    // `register_torch_operators` fills `TORCH` before it registers kernels.
    let Some((shim, operators)) = TORCH.get() else { return Exception::NONE };
    let operator = &operators[index];
    let called = || {
        // SAFETY:
        // - stack: as many values as the operator has parameters.
        let values = unsafe { std::slice::from_raw_parts(stack, inputs as usize) };
        // SAFETY:
        // - values: the caller's promise.
        let arguments = unsafe { Arguments::take(shim, operator, values) };
        run(shim, operator, &arguments)
    };
    let message = match std::panic::catch_unwind(std::panic::AssertUnwindSafe(called)) {
        Ok(Ok(results)) => {
            for (index, value) in results.into_iter().flatten().enumerate() {
                // SAFETY:
                // - stack: it has room for the results of the schema, and these are as many.
                unsafe { stack.add(index).write(value) };
            }
            return Exception::NONE;
        }
        Ok(Err(error)) => error.to_string(),
        Err(_) => format!("rmsnorm::{} panicked, which is a bug in rmsnorm", operator.name),
    };
    shim.thrower.exception(&message)
}

/// One function per operator, since the dispatcher does not tell a kernel the operator's name.
macro_rules! kernels {
    ($($index:literal)*) => {
        [$({
            unsafe extern "C-unwind" fn called(stack: *mut Value, inputs: u64, _outputs: u64) {
                // SAFETY:
                // - stack: the dispatcher's, for the operator that this function is registered for.
                let exception = unsafe { kernel($index, stack, inputs) };
                if let Some(throw) = exception.throw {
                    // SAFETY:
                    // - object: an exception that is thrown once; type_info and destroy are of its
                    //   type;
                    // - caller: C++, and this frame has nothing left to drop.
                    unsafe { throw(exception.object, exception.type_info, exception.destroy) }
                }
            }
            called as Kernel
        }),*]
    };
}

const KERNELS: [Kernel; SCHEMAS.len()] = kernels!(0 1 2 3 4 5 6 7 8 9 10 11 12);

/// The schemas of the operators, to be defined in the namespace `rmsnorm`.
#[pyfunction]
pub(crate) fn torch_schemas() -> Vec<&'static str> {
    SCHEMAS.to_vec()
}

/// Registers the kernels of the operators for the CPU and CUDA. `libtorch_cpu` and `libtorch_cuda`
/// are paths of libraries that PyTorch has loaded.
#[pyfunction]
#[pyo3(signature = (libtorch_cpu, libtorch_cuda=None))]
pub(crate) fn register_torch_operators(libtorch_cpu: &str, libtorch_cuda: Option<&str>) -> PyResult<()> {
    let fail = |message: String| PyRuntimeError::new_err(message);
    // SAFETY:
    // - libraries: the caller's, of the imported PyTorch; the package requires 2.10 or later.
    let shim = unsafe { Shim::load(libtorch_cpu, libtorch_cuda) }.map_err(fail)?;
    let known = |schema| Operator::of(schema).ok_or_else(|| fail(format!("there is no operator for {schema}")));
    let operators = SCHEMAS.into_iter().map(known).collect::<PyResult<Vec<_>>>()?;
    let (shim, operators) = TORCH.get_or_init(|| (shim, operators));
    for (operator, kernel) in operators.iter().zip(KERNELS) {
        let name = CString::new(operator.name)?;
        for key in [c"CPU", c"CUDA"] {
            shim.register(c"rmsnorm", key, &name, kernel).map_err(fail)?;
        }
    }
    Ok(())
}
