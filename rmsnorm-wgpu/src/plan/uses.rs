//! The tensors that a program reads and writes, and the ones that share a binding.

use rmsnorm_spec::quant::ScaleKind;
use rmsnorm_spec::{Access, Tensor, TensorShape};

use super::{KernelKey, Program};

impl KernelKey {
    /// Whether the program only computes the scale of a tensor.
    pub(crate) fn finds_scale(&self) -> bool {
        self.call.quant.is_some_and(|quant| quant.scale == ScaleKind::Current)
    }
}

/// The contents of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A matrix of elements, or one row of them.
    Elements,
    /// One f32 per row.
    Statistic,
    /// f32, in the form that the program needs, and tensors that share its binding.
    Workspace,
    /// One f32 that is read.
    Scalar,
    /// One f32, not negative: the maximum of magnitudes.
    Amax,
    /// Scales of rows and blocks.
    Scales,
    /// Codes of `TransposeCodes`, which moves four at once.
    Bytes,
    /// Codes of the columnwise copy, four rows at once, which may share words.
    ColumnBytes,
    /// The tensor of `TensorScale`: an amax that becomes a scale.
    Found,
    /// The tensor that `Clear` zeroes.
    Cleared,
}

/// How a program uses a tensor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Use {
    pub(crate) tensor: Tensor,
    pub(crate) kind: Kind,
    pub(crate) is_loaded: bool,
    pub(crate) is_stored: bool,
}

impl Use {
    /// Whether it is declared `read_write`.
    pub(crate) fn is_written(&self, key: &KernelKey) -> bool {
        self.is_stored || key.aliased && !self.is_shared(key)
    }

    /// Whether it lies in the workspace: vectors that are read, statistics, and a given scale, if the
    /// device has too few bindings.
    pub(crate) fn is_shared(&self, key: &KernelKey) -> bool {
        let is_small = match self.kind {
            Kind::Elements => self.tensor.shape() == TensorShape::Cols && !self.is_stored,
            Kind::Statistic | Kind::Scalar => true,
            Kind::Workspace | Kind::Amax | Kind::Scales | Kind::Bytes | Kind::ColumnBytes => false,
            Kind::Found | Kind::Cleared => false,
        };
        key.shares_binding && is_small
    }
}

/// The tensors of a program, in the order of their binding numbers.
pub(crate) fn uses(key: &KernelKey) -> Vec<Use> {
    key.call.tensors.iter().filter_map(|tensor| of_call(key, tensor)).chain(workspace(key)).collect()
}

/// The tensors that have a binding.
pub(crate) fn bound(key: &KernelKey) -> Vec<Use> {
    uses(key).into_iter().filter(|used| !used.is_shared(key)).collect()
}

/// A tensor of the call; `None` for a gradient if the program only writes its partial sums.
fn of_call(key: &KernelKey, tensor: Tensor) -> Option<Use> {
    let direction = key.program.info().direction;
    let kind = match tensor.shape() {
        TensorShape::Matrix if key.program == Program::TransposeCodes => return of_codes(key, tensor),
        TensorShape::Cols if tensor.access(direction)? == Access::Write && key.program != Program::ReducePartials => {
            return None;
        }
        TensorShape::Matrix | TensorShape::Cols => Kind::Elements,
        // `Columnwise` reads statistics, and includes files of programs that write them.
        TensorShape::Rows if key.program == Program::Columnwise => {
            return Some(Use { tensor, kind: Kind::Statistic, is_loaded: true, is_stored: true });
        }
        TensorShape::Rows => Kind::Statistic,
        TensorShape::Transposed | TensorShape::One | TensorShape::Scales | TensorShape::ScalesColumnwise => {
            return of_codes(key, tensor);
        }
        TensorShape::Workspace => return None,
    };
    let is_loaded = match tensor.access(direction)? {
        Access::Read => true,
        // An overwritten tensor was an input.
        Access::Write if key.call.form.is_residual_after() => is_sum_read(key, tensor),
        Access::Write if tensor.is_matrix() => key.call.tensors.is_in_place(),
        // Gradients. Statistics are only written.
        Access::Write => key.call.adds_to_gradients,
    };
    Some(Use { tensor, kind, is_loaded, is_stored: tensor.access(direction)? == Access::Write })
}

/// Whether it is the sum with a residual, and either overwrites the residual or is read back for
/// the next norm.
fn is_sum_read(key: &KernelKey, tensor: Tensor) -> bool {
    let is_read_back = key.program == Program::ForwardStreaming && key.call.form.norms_twice();
    tensor == Tensor::ResidualOut && (is_read_back || !key.call.tensors.has(Tensor::Residual))
}

/// A tensor of quantized calls, or the codes of the program that transposes them.
fn of_codes(key: &KernelKey, tensor: Tensor) -> Option<Use> {
    let (kind, is_loaded, is_stored) = match (key.program, tensor) {
        (Program::Clear, _) => (Kind::Cleared, false, true),
        (Program::TensorScale, _) => (Kind::Found, true, true),
        (Program::TransposeCodes, Tensor::Codes) => (Kind::Bytes, true, false),
        (Program::TransposeCodes, _) => (Kind::Bytes, false, true),
        (_, Tensor::CodesColumnwise) => (Kind::ColumnBytes, false, true),
        (_, Tensor::ScalesColumnwise) => (Kind::Scales, false, true),
        (_, Tensor::Scale) => (Kind::Scalar, true, false),
        (_, Tensor::Amax) => (Kind::Amax, true, true),
        (_, Tensor::Scales) if key.finds_scale() => (Kind::Amax, true, true),
        (_, Tensor::Scales) => (Kind::Scales, false, true),
        _ => return None,
    };
    Some(Use { tensor, kind, is_loaded, is_stored })
}

/// The part of the workspace that the program uses.
fn workspace(key: &KernelKey) -> Option<Use> {
    let has_gradients = key.call.tensors.sums_over_rows() > 0;
    let (is_bound, is_stored) = match key.program {
        Program::Forward
        | Program::ForwardStreaming
        | Program::QuantizedForward
        | Program::QuantizedForwardStreaming
        | Program::Columnwise => (key.shares_binding, key.shares_binding),
        Program::TransposeCodes | Program::TensorScale | Program::Clear | Program::Copy => (false, false),
        Program::Backward => (has_gradients || key.shares_binding, has_gradients),
        Program::BackwardRowSums => (true, true),
        Program::BackwardColumns => (true, has_gradients),
        Program::ReducePartials => (true, false),
    };
    is_bound.then_some(Use { tensor: Tensor::Workspace, kind: Kind::Workspace, is_loaded: true, is_stored })
}
