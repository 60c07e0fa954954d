//! An invalid call: a valid one with one property falsified, the required error, and the check of
//! the answer.

use rmsnorm_spec::quant::{CodeType, QuantSpec, ScaleKind};
use rmsnorm_spec::{DType, DTypes, Error, GradReduction, Norm, NormSpec, Tensor, TensorSet};

use crate::case::{Case, Kind};
use crate::finding::{Check, Finding, Status};
use crate::run::calls::{Context, Scenario, call};
use crate::run::device::Device;
use crate::run::memory::{Call, Poison};

/// The required error, with the argument that it names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    Eps,
    WeightOffset,
    EmptyRow,
    Stride(&'static str),
    Length(&'static str),
    TooLarge(&'static str),
    Missing(&'static str),
    Unexpected(&'static str),
    Invalid(&'static str),
    Unsupported,
}

impl Refusal {
    /// The refusal that corresponds to an error; `None` for errors that no invalid argument causes.
    fn of(error: &Error) -> Option<Refusal> {
        match error {
            Error::InvalidEps { .. } => Some(Refusal::Eps),
            Error::InvalidWeightOffset { .. } => Some(Refusal::WeightOffset),
            Error::EmptyRow => Some(Refusal::EmptyRow),
            Error::Stride { arg, .. } => Some(Refusal::Stride(arg)),
            Error::Length { arg, .. } => Some(Refusal::Length(arg)),
            Error::TooLarge { arg, .. } => Some(Refusal::TooLarge(arg)),
            Error::Missing { arg, .. } => Some(Refusal::Missing(arg)),
            Error::Unexpected { arg, .. } => Some(Refusal::Unexpected(arg)),
            Error::InvalidArgument { arg, .. } => Some(Refusal::Invalid(arg)),
            Error::Unsupported { .. } => Some(Refusal::Unsupported),
            // `_` stands for errors that are added later.
            Error::Overlap { .. } | Error::Unavailable { .. } | Error::Device { .. } | _ => None,
        }
    }
}

/// A way to falsify a valid call: the invalid property, the required error, and the change.
pub(crate) type Misuse = (&'static str, Refusal, fn(&mut GoodCall));

/// A call with one invalid property.
pub(crate) struct BadCall {
    /// Its id, `misuse:<kind>:<what is wrong>`.
    pub id: String,
    kind: Kind,
    refusal: Refusal,
    falsify: Box<dyn Fn(&mut GoodCall) + Send>,
}

impl BadCall {
    /// The call of that kind with this invalid property.
    pub fn new(kind: Kind, what: &str, refusal: Refusal, falsify: impl Fn(&mut GoodCall) + Send + 'static) -> Self {
        BadCall { id: format!("misuse:{}:{what}", kind.name()), kind, refusal, falsify: Box::new(falsify) }
    }

    /// Makes the call, and checks its answer and its memory.
    pub async fn run(&self, context: Context<'_>) -> Result<(), Status> {
        let mut falsified = GoodCall::new(context.device, self.kind);
        (self.falsify)(&mut falsified);
        let GoodCall { kind, spec, dtypes, reduction, mut call } = falsified;
        let fail = |detail| Err(Status::Fail(Finding { check: Check::Misuse, output: kind.name(), detail }));
        match context.device.make(&spec, dtypes, reduction, &mut call).await {
            Err(error) => Err(error.status(kind.name())),
            Ok(Ok(())) => fail(format!("accepted, expected {:?}", self.refusal)),
            Ok(Err(error)) if Refusal::of(&error) != Some(self.refusal) => {
                fail(format!("expected {:?}, got: {error}", self.refusal))
            }
            Ok(Err(_)) => match call.tensors.iter().find(|tensor| !tensor.is_untouched()) {
                Some(tensor) => fail(format!("the refused call changed {}", tensor.name.name())),
                None => Ok(()),
            },
        }
    }
}

/// A valid call with every optional tensor, to be falsified.
pub(crate) struct GoodCall {
    pub kind: Kind,
    pub spec: NormSpec,
    pub dtypes: DTypes,
    pub reduction: GradReduction,
    pub call: Call,
}

impl GoodCall {
    /// A call of layer norm with 3 rows and 5 columns.
    pub fn new(device: &dyn Device, kind: Kind) -> Self {
        let quant = Some(QuantSpec::new(CodeType::E5m2, ScaleKind::Given));
        // Devices with few buffer bindings may not support `dresidual`.
        let present = TensorSet::of(&Tensor::ALL).without(Tensor::Dresidual);
        let case = Case { present, quant, ..Case::plain(kind, Norm::Layer, DType::F16, 3, 5) }.normalized();
        let inputs = Scenario::new(&case).inputs;
        let workspace_elements = |problem: &_| device.workspace_elements(problem);
        let call = call(&case, kind.direction, &inputs, workspace_elements, Poison::Nan);
        GoodCall { kind, spec: case.spec(), dtypes: case.dtypes, reduction: GradReduction::Partials, call }
    }

    pub fn lose(&mut self, tensor: Tensor) {
        self.call.tensors.retain(|guarded| guarded.name != tensor);
    }

    pub fn add_after(&mut self) {
        self.spec = self.spec.residual_after();
    }

    /// Reads and writes the tensors in these dtypes. All have 16 bits, so a buffer can be read as
    /// either; a 32-bit tensor, such as an f32 sum, keeps its dtype.
    pub fn change_dtypes(&mut self, dtypes: DTypes) {
        self.dtypes = dtypes;
        for tensor in &mut self.call.tensors {
            let dtype = tensor.name.dtype(self.kind.direction, dtypes);
            if let Some(dtype) = dtype.filter(|dtype| dtype.size() == tensor.storage.size()) {
                tensor.storage = dtype.into();
            }
        }
    }
}
