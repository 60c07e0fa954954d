//! The tensors that a program binds.

use rmsnorm_spec::{DType, Norm};

use crate::plan::{KernelKey, Program};

/// A storage buffer of some program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Tensor {
    X,
    Residual,
    Dy,
    DresidualOut,
    Y,
    ResidualOut,
    Dx,
    Weight,
    Bias,
    Mean,
    Rstd,
    Dweight,
    Dbias,
    Workspace,
}

impl Tensor {
    /// The number of its binding.
    pub(crate) const fn number(self) -> u32 {
        self as u32 + 1
    }

    /// Its name, in messages and in shaders.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Tensor::X => "x",
            Tensor::Residual => "residual",
            Tensor::Dy => "dy",
            Tensor::DresidualOut => "dresidual_out",
            Tensor::Y => "y",
            Tensor::ResidualOut => "residual_out",
            Tensor::Dx => "dx",
            Tensor::Weight => "weight",
            Tensor::Bias => "bias",
            Tensor::Mean => "mean",
            Tensor::Rstd => "rstd",
            Tensor::Dweight => "dweight",
            Tensor::Dbias => "dbias",
            Tensor::Workspace => "workspace",
        }
    }
}

/// What a tensor holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A matrix of elements, or one row of them.
    Elements(DType),
    /// One f32 a row.
    Statistic,
    /// f32, in whatever form the program has them.
    Workspace,
}

/// A tensor, as one program uses it.
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

/// Every tensor that a program uses, by the numbers of their bindings.
pub(super) fn uses(key: &KernelKey) -> Vec<Use> {
    let mut uses = match key.program {
        Program::Forward | Program::ForwardStreaming => forward(key),
        Program::Backward | Program::BackwardRowSums | Program::BackwardColumns => backward(key),
        Program::ReducePartials => reduction(key),
        Program::Copy => vec![loaded(Tensor::X, key.activation), stored(Tensor::Y, key.activation)],
    };
    uses.sort_by_key(|used| used.tensor);
    uses
}

fn forward(key: &KernelKey) -> Vec<Use> {
    let KernelKey { activation, weight, residual, flags, .. } = *key;
    let mut uses = vec![Use { is_loaded: flags.in_place, ..stored(Tensor::Y, activation) }];
    let mut add = |is_there: bool, used: Use| uses.extend(is_there.then_some(used));
    add(!flags.in_place, loaded(Tensor::X, activation));
    add(flags.residual && !flags.in_place, loaded(Tensor::Residual, residual));
    let is_loaded = flags.in_place && flags.residual;
    add(flags.residual_out || is_loaded, Use { is_loaded, ..stored(Tensor::ResidualOut, residual) });
    add(flags.weight, loaded(Tensor::Weight, weight));
    add(flags.bias, loaded(Tensor::Bias, weight));
    add(flags.mean, Use { kind: Kind::Statistic, ..stored(Tensor::Mean, DType::F32) });
    add(flags.rstd, Use { kind: Kind::Statistic, ..stored(Tensor::Rstd, DType::F32) });
    uses
}

fn backward(key: &KernelKey) -> Vec<Use> {
    let KernelKey { program, norm, activation, weight, residual, flags, .. } = *key;
    let (writes_dx, reads_sums) = (program != Program::BackwardRowSums, program == Program::BackwardColumns);
    let has_gradients = flags.dweight || flags.dbias;
    let mut uses = vec![
        loaded(Tensor::Dy, activation),
        loaded(Tensor::X, residual),
        Use { kind: Kind::Statistic, ..loaded(Tensor::Rstd, DType::F32) },
    ];
    let mut add = |is_there: bool, used: Use| uses.extend(is_there.then_some(used));
    add(norm == Norm::Layer, Use { kind: Kind::Statistic, ..loaded(Tensor::Mean, DType::F32) });
    add(flags.weight, loaded(Tensor::Weight, weight));
    add(writes_dx, stored(Tensor::Dx, activation));
    add(flags.dresidual_out, loaded(Tensor::DresidualOut, residual));
    let workspace = Use { kind: Kind::Workspace, ..loaded(Tensor::Workspace, DType::F32) };
    add(!writes_dx || reads_sums || has_gradients, Use { is_stored: !writes_dx || has_gradients, ..workspace });
    uses
}

fn reduction(key: &KernelKey) -> Vec<Use> {
    let mut uses = vec![Use { kind: Kind::Workspace, ..loaded(Tensor::Workspace, DType::F32) }];
    uses.extend(key.flags.dweight.then(|| stored(Tensor::Dweight, key.weight)));
    uses.extend(key.flags.dbias.then(|| stored(Tensor::Dbias, key.weight)));
    uses
}

const fn loaded(tensor: Tensor, dtype: DType) -> Use {
    Use { tensor, kind: Kind::Elements(dtype), is_loaded: true, is_stored: false }
}

const fn stored(tensor: Tensor, dtype: DType) -> Use {
    Use { tensor, kind: Kind::Elements(dtype), is_loaded: false, is_stored: true }
}
