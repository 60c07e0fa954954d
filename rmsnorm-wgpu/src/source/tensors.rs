//! The tensors that a program binds.

use rmsnorm_spec::{Access, Tensor, TensorShape};

use super::finds_scale;
use crate::plan::{KernelKey, Program};

/// The contents of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A matrix of elements, or one row of them.
    Elements,
    /// One f32 per row.
    Statistic,
    /// f32, in the form that the program needs.
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
pub(super) struct Use {
    pub(super) tensor: Tensor,
    pub(super) kind: Kind,
    pub(super) is_loaded: bool,
    pub(super) is_stored: bool,
}

impl Use {
    /// Whether it is declared `read_write`.
    pub(super) const fn is_written(&self, key: &KernelKey) -> bool {
        self.is_stored || key.aliased
    }
}

/// The tensors that a program binds, by binding number.
pub(super) fn uses(key: &KernelKey) -> Vec<Use> {
    key.call.tensors.iter().filter_map(|tensor| of_call(key, tensor)).chain(workspace(key)).collect()
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
        (_, Tensor::Scales) if finds_scale(key) => (Kind::Amax, true, true),
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
        | Program::TransposeCodes
        | Program::Columnwise
        | Program::TensorScale
        | Program::Clear
        | Program::Copy => (false, false),
        Program::Backward => (has_gradients, true),
        Program::BackwardRowSums => (true, true),
        Program::BackwardColumns => (true, has_gradients),
        Program::ReducePartials => (true, false),
    };
    is_bound.then_some(Use { tensor: Tensor::Workspace, kind: Kind::Workspace, is_loaded: true, is_stored })
}
