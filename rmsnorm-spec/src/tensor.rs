//! The list of tensors that calls have: names, shapes, dtypes, and their access in each direction.
//!
//! Code for every tensor of a call (validation, kernel flags, parameters, test memory, file names)
//! is a loop over [`Tensor::ALL`] or a [`TensorSet`], or a lookup here.

use std::fmt;

use crate::quant::QuantSpec;
use crate::{DType, DTypes, Piece, Storage};

/// The direction of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Direction {
    /// Computes `y` and the statistics from `x`:
    /// [`NormBackend::forward`](crate::NormBackend::forward).
    Forward,
    /// Computes `dx` and the other gradients from `dy`:
    /// [`NormBackend::backward`](crate::NormBackend::backward).
    Backward,
    /// Computes codes and scales from `x`:
    /// [`NormBackend::quantized_forward`](crate::NormBackend::quantized_forward).
    QuantizedForward,
}

impl Direction {
    /// Every direction.
    pub const ALL: [Direction; 3] = [Direction::Forward, Direction::Backward, Direction::QuantizedForward];

    /// The name used in reports: `forward`, `backward` or `quantized_forward`.
    pub const fn name(self) -> &'static str {
        match self {
            Direction::Forward => "forward",
            Direction::Backward => "backward",
            Direction::QuantizedForward => "quantized_forward",
        }
    }

    /// The tensors that a call of this direction may read.
    pub const fn reads(self) -> TensorSet {
        self.tensors()[Access::Read as usize]
    }

    /// The tensors that a call of this direction may write.
    pub const fn writes(self) -> TensorSet {
        self.tensors()[Access::Write as usize]
    }

    /// By access, computed when the crate is compiled.
    const fn tensors(self) -> [TensorSet; 2] {
        const OF: [[TensorSet; 2]; Direction::ALL.len()] = {
            let mut of = [[TensorSet::NONE; 2]; Direction::ALL.len()];
            let mut index = 0;
            while index < Direction::ALL.len() * Tensor::COUNT {
                let (direction, tensor) = (Direction::ALL[index / Tensor::COUNT], Tensor::ALL[index % Tensor::COUNT]);
                if let Some(access) = tensor.access(direction) {
                    let set = &mut of[direction as usize][access as usize];
                    *set = set.with(tensor);
                }
                index += 1;
            }
            of
        };
        OF[self as usize]
    }
}

/// Defines the tensors from a table with one row per tensor: its name, shape and role, its access
/// in each direction, and the pieces of a norm that it belongs to, if it belongs to any.
macro_rules! tensors {
    ($($(#[doc = $doc:literal])+ $tensor:ident =
        $name:literal, $shape:ident, $role:ident, [$($access:ident),+] $(, of $($piece:ident),+)?;)+) => {
        /// A tensor of a call, named as in the argument structs. The order is the order of
        /// validation, and part of the identity of the conformance suite's cases: add a new tensor
        /// at the end.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum Tensor {
            $($(#[doc = $doc])+ $tensor,)+
        }

        impl Tensor {
            /// Every tensor, in the order of declaration.
            pub const ALL: [Tensor; [$($name),+].len()] = [$(Tensor::$tensor),+];

            const fn facts(self) -> &'static Facts {
                // An array: a `match` would become a table of pointers, one load more.
                const OF: [Facts; Tensor::COUNT] = [$(Facts {
                    name: $name,
                    shape: TensorShape::$shape,
                    role: Role::$role,
                    access: [$(Facts::$access),+],
                    pieces: &[$($(Piece::$piece),+)?],
                }),+];
                &OF[self as usize]
            }
        }
    };
}

/// A row of the table.
struct Facts {
    name: &'static str,
    shape: TensorShape,
    role: Role,
    /// In the order of [`Direction::ALL`].
    access: [Option<Access>; Direction::ALL.len()],
    /// At most one of each slot.
    pieces: &'static [Piece],
}

impl Facts {
    const READ: Option<Access> = Some(Access::Read);
    const WRITE: Option<Access> = Some(Access::Write);
    const NONE: Option<Access> = None;
}

tensors! {
    /// The tensor to normalize; in backward, the tensor that forward normalized.
    X = "x", Matrix, Activation, [READ, READ, READ];
    /// Added to `x` before the norm, or to the result after it. In a set without `X` the call
    /// normalizes it alone ([`TensorSet::is_cast`]): its argument is called `x`.
    Residual = "residual", Matrix, Residual, [READ, NONE, READ], of Residual;
    /// Multiplied with the normalized row.
    Weight = "weight", Cols, Weight, [READ, READ, READ];
    /// Added after the weight; backward reads it with a gate after the norm.
    Bias = "bias", Cols, Weight, [READ, READ, READ];
    /// The result. In a set without `X` it overwrites `x`: the call is in place.
    Y = "y", Matrix, Activation, [WRITE, NONE, WRITE];
    /// The rounded sum of `residual` and `x`, or of `residual` and the norm of `x`. In a set
    /// without `Residual` it overwrites the residual.
    ResidualOut = "residual_out", Matrix, Residual, [WRITE, NONE, WRITE], of Residual;
    /// The mean of every row.
    Mean = "mean", Rows, F32, [WRITE, READ, WRITE];
    /// `1 / sqrt(var + eps)` of every row.
    Rstd = "rstd", Rows, F32, [WRITE, READ, WRITE];
    /// The gradient of `y`.
    Dy = "dy", Matrix, Activation, [NONE, READ, NONE];
    /// The gradient of `residual_out` from later layers.
    DresidualOut = "dresidual_out", Matrix, Residual, [NONE, READ, NONE], of Residual;
    /// The gradient of `x` and of `residual`.
    Dx = "dx", Matrix, Activation, [NONE, WRITE, NONE];
    /// The gradient of `weight`.
    Dweight = "dweight", Cols, Gradient, [NONE, WRITE, NONE];
    /// The gradient of `bias`.
    Dbias = "dbias", Cols, Gradient, [NONE, WRITE, NONE];
    /// Memory for partial sums.
    Workspace = "workspace", Workspace, F32, [NONE, WRITE, NONE];
    /// The gradient of `residual`: equal to `dx`, in the residual stream's dtype. In a set without
    /// `Dx` its argument is called `dx`.
    Dresidual = "dresidual", Matrix, Residual, [NONE, WRITE, NONE], of Residual;
    /// The result as 8-bit codes.
    Codes = "codes", Matrix, Code, [NONE, NONE, WRITE], of Quantize;
    /// The same codes, transposed.
    CodesT = "codes_t", Transposed, Code, [NONE, NONE, WRITE], of Quantize;
    /// The per-tensor scale that the caller passes.
    Scale = "scale", One, F32, [NONE, NONE, READ], of Quantize;
    /// The scales that the call computes.
    Scales = "scales", Scales, Scale, [NONE, NONE, WRITE], of Quantize;
    /// The largest magnitude of the quantized values.
    Amax = "amax", One, F32, [NONE, NONE, WRITE], of Quantize;
    /// The quantized transpose of the result, with scales along columns.
    CodesColumnwise = "codes_columnwise", Transposed, Code, [NONE, NONE, WRITE], of Quantize;
    /// The scales of `codes_columnwise`.
    ScalesColumnwise = "scales_columnwise", ScalesColumnwise, Scale, [NONE, NONE, WRITE], of Quantize;
    /// The weight of the next norm, which normalizes `residual_out`.
    NextWeight = "next_weight", Cols, Weight, [READ, NONE, NONE], of NextNorm;
    /// The bias of the next norm.
    NextBias = "next_bias", Cols, Weight, [READ, NONE, NONE], of NextNorm;
    /// The mean of every row of `residual_out`, from the next norm.
    NextMean = "next_mean", Rows, F32, [WRITE, NONE, NONE], of NextNorm;
    /// `1 / sqrt(var + eps)` of every row of `residual_out`, from the next norm.
    NextRstd = "next_rstd", Rows, F32, [WRITE, NONE, NONE], of NextNorm;
    /// The gate, whose activation is multiplied with `x` or with the result.
    Gate = "gate", Matrix, Activation, [READ, READ, READ], of GateBefore, GateAfter;
    /// The gradient of `gate`.
    Dgate = "dgate", Matrix, Activation, [NONE, WRITE, NONE], of GateBefore, GateAfter;
}

/// What the elements of a tensor are: values of one of the call's dtypes, or of another type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Values of the activations' dtype.
    Activation,
    /// Parameters of the norm.
    Weight,
    /// Gradients of parameters: of their dtype, or f32 sums ([`Problem::storage`](crate::Problem::storage)).
    Gradient,
    /// Values of the residual stream.
    Residual,
    /// Values that are f32 in every call.
    F32,
    /// 8-bit codes.
    Code,
    /// Scales, as f32 or as bytes.
    Scale,
}

/// The shape of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorShape {
    /// (rows, cols), with a row stride.
    Matrix,
    /// (cols, rows), with a row stride.
    Transposed,
    /// (cols)
    Cols,
    /// (rows), or (rows, groups) with groups of columns.
    Rows,
    /// [`NormBackend::workspace_len`](crate::NormBackend::workspace_len) elements or more.
    Workspace,
    /// (1)
    One,
    /// [`QuantSpec::scales_len`] elements.
    Scales,
    /// [`QuantSpec::scales_len`] elements of [`QuantSpec::columnwise`], for a (cols, rows) matrix.
    ScalesColumnwise,
}

/// A call's access to a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// The call reads it.
    Read,
    /// The call writes it; its old values have no effect, unless the call is in place.
    Write,
}

impl Tensor {
    /// The number of tensors.
    pub const COUNT: usize = Tensor::ALL.len();

    /// The name in the argument structs, in errors, kernels and files.
    pub const fn name(self) -> &'static str {
        self.facts().name
    }

    /// The tensor of that [`name`](Self::name), if there is one.
    pub fn from_name(name: &str) -> Option<Tensor> {
        Tensor::ALL.into_iter().find(|tensor| tensor.name() == name)
    }

    /// The shape.
    pub const fn shape(self) -> TensorShape {
        self.facts().shape
    }

    /// What its elements are in a call of that direction. Backward's `x` is of the residual stream,
    /// which forward normalized.
    pub const fn role(self, direction: Direction) -> Role {
        match (self, direction) {
            (Tensor::X, Direction::Backward) => Role::Residual,
            (tensor, _) => tensor.facts().role,
        }
    }

    /// The dtype in a call of that direction, for tensors of floats: codes are not floats, and
    /// scales need not be.
    pub const fn dtype(self, direction: Direction, dtypes: DTypes) -> Option<DType> {
        match self.role(direction) {
            Role::Activation => Some(dtypes.activation),
            Role::Weight | Role::Gradient => Some(dtypes.weight),
            Role::Residual => Some(dtypes.residual),
            Role::F32 => Some(DType::F32),
            Role::Code | Role::Scale => None,
        }
    }

    /// The storage of its elements in a call of that direction; `None` for codes and scales of a
    /// call that is not quantized.
    pub const fn storage(self, direction: Direction, dtypes: DTypes, quant: Option<&QuantSpec>) -> Option<Storage> {
        Some(match (self.dtype(direction, dtypes), quant) {
            (Some(dtype), _) => Storage::Float(dtype),
            (None, None) => return None,
            (None, Some(quant)) => match self.shape() {
                TensorShape::Scales => Storage::of_scales(quant.scale_type()),
                TensorShape::ScalesColumnwise => Storage::of_scales(quant.columnwise().scale_type()),
                TensorShape::Matrix
                | TensorShape::Transposed
                | TensorShape::Cols
                | TensorShape::Rows
                | TensorShape::Workspace
                | TensorShape::One => Storage::Code(quant.codes),
            },
        })
    }

    /// The access of a call of that direction; `None` if the call has no such tensor.
    pub const fn access(self, direction: Direction) -> Option<Access> {
        self.facts().access[direction as usize]
    }

    /// The pieces of a norm that it belongs to, at most one of each slot: [`Piece::tensors`].
    pub const fn pieces(self) -> &'static [Piece] {
        self.facts().pieces
    }

    /// Whether it is a matrix, with a row stride.
    pub const fn is_matrix(self) -> bool {
        matches!(self.shape(), TensorShape::Matrix | TensorShape::Transposed)
    }
}

impl fmt::Display for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

set_of! {
    /// A set of tensors, of a call or of a kernel.
    TensorSet(u64) of Tensor
}

impl TensorSet {
    /// Whether `y` overwrites `x`.
    pub const fn is_in_place(self) -> bool {
        self.has(Tensor::Y) && !self.has(Tensor::X) && !self.has(Tensor::Residual)
    }

    /// Whether `x` has the dtype of the residual stream and `y` that of the activations: forward
    /// normalizes `Residual` without an `X`, and backward stores `Dresidual` and no `Dx`.
    pub const fn is_cast(self) -> bool {
        let of_forward = self.has(Tensor::Residual) && self.has(Tensor::Y) && !self.has(Tensor::X);
        of_forward || self.has(Tensor::Dresidual) && !self.has(Tensor::Dx)
    }

    /// The argument of a tensor that stands for another one: `x` and `dx` of a cast. The set may end
    /// before the tensor.
    pub(crate) const fn arg_of_cast(self, tensor: Tensor) -> Option<&'static str> {
        if matches!(tensor, Tensor::Residual) && !self.has(Tensor::X) {
            Some(Tensor::X.name())
        } else if matches!(tensor, Tensor::Dresidual) && !self.has(Tensor::Dx) {
            Some(Tensor::Dx.name())
        } else {
            None
        }
    }

    /// Whether a residual is added: `Residual`, or the residual that `ResidualOut` overwrites.
    pub const fn adds_residual(self) -> bool {
        self.has(Tensor::Residual) && !self.is_cast() || self.has(Tensor::ResidualOut)
    }

    /// The matrices, with a row stride.
    pub const MATRICES: TensorSet = {
        let (mut set, mut index) = (TensorSet::NONE, 0);
        while index < Tensor::COUNT {
            set = set.set(Tensor::ALL[index], Tensor::ALL[index].is_matrix());
            index += 1;
        }
        set
    };

    /// The sums over the rows.
    pub const SUMS_OVER_ROWS: TensorSet = TensorSet::of(&[Tensor::Dweight, Tensor::Dbias]);

    /// The number of sums over the rows: `dweight`, `dbias`, both or none.
    pub const fn sums_over_rows(self) -> usize {
        self.intersection(TensorSet::SUMS_OVER_ROWS).len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::{CodeType, ScaleKind, ScaleLayout, ScaleRounding};

    #[test]
    fn tensors_are_found_by_their_names_and_stand_in_their_order() {
        for (index, tensor) in Tensor::ALL.into_iter().enumerate() {
            assert_eq!((Tensor::from_name(tensor.name()), tensor as usize), (Some(tensor), index));
            assert_eq!(tensor.to_string(), tensor.name());
        }
        assert_eq!((Tensor::from_name("X"), Tensor::from_name("")), (None, None));
    }

    /// The argument structs as documented.
    #[test]
    fn each_direction_has_the_tensors_of_its_arguments() {
        let names = |direction: Direction, access| {
            let tensors = if access == Access::Read { direction.reads() } else { direction.writes() };
            assert!(tensors.iter().all(|tensor| tensor.access(direction) == Some(access)), "{tensors:?}");
            tensors.iter().map(Tensor::name).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(names(Direction::Forward, Access::Read), "x residual weight bias next_weight next_bias gate");
        assert_eq!(names(Direction::Forward, Access::Write), "y residual_out mean rstd next_mean next_rstd");
        assert_eq!(names(Direction::Backward, Access::Read), "x weight bias mean rstd dy dresidual_out gate");
        assert_eq!(names(Direction::Backward, Access::Write), "dx dweight dbias workspace dresidual dgate");
        assert_eq!(names(Direction::QuantizedForward, Access::Read), "x residual weight bias scale gate");
        let written = "y residual_out mean rstd codes codes_t scales amax codes_columnwise scales_columnwise";
        assert_eq!(names(Direction::QuantizedForward, Access::Write), written);
    }

    #[test]
    fn dtypes_and_shapes_are_those_of_the_arguments() {
        let dtypes = DTypes { activation: DType::F16, weight: DType::F32, residual: DType::Bf16 };
        let of = |dtype, direction| {
            let is = |t: &Tensor| t.access(direction).is_some() && t.dtype(direction, dtypes) == Some(dtype);
            Tensor::ALL.into_iter().filter(is).collect::<TensorSet>()
        };
        use Tensor::*;
        assert_eq!(of(DType::F16, Direction::Forward), TensorSet::of(&[X, Y, Gate]));
        assert_eq!(of(DType::Bf16, Direction::Forward), TensorSet::of(&[Residual, ResidualOut]));
        assert_eq!(
            of(DType::F32, Direction::Forward),
            TensorSet::of(&[Weight, Bias, Mean, Rstd, NextWeight, NextBias, NextMean, NextRstd])
        );
        assert_eq!(of(DType::F16, Direction::Backward), TensorSet::of(&[Dy, Dx, Gate, Dgate]));
        assert_eq!(of(DType::Bf16, Direction::Backward), TensorSet::of(&[X, DresidualOut, Dresidual]));
        let f32s = [Weight, Bias, Mean, Rstd, Dweight, Dbias, Workspace];
        assert_eq!(of(DType::F32, Direction::Backward), TensorSet::of(&f32s));
        assert_eq!(of(DType::F16, Direction::QuantizedForward), TensorSet::of(&[X, Y, Gate]));
        assert_eq!(of(DType::Bf16, Direction::QuantizedForward), TensorSet::of(&[Residual, ResidualOut]));
        let f32s = [Weight, Bias, Mean, Rstd, Scale, Amax];
        assert_eq!(of(DType::F32, Direction::QuantizedForward), TensorSet::of(&f32s));
        let row = QuantSpec::new(CodeType::E5m2, ScaleKind::Row);
        let mx = QuantSpec::new(CodeType::E5m2, ScaleKind::Mx { rounding: ScaleRounding::Up });
        let storage = |tensor: Tensor, quant| tensor.storage(Direction::QuantizedForward, dtypes, quant);
        for quant in [&row, &mx] {
            let codes = Some(Storage::Code(CodeType::E5m2));
            assert_eq!([Codes, CodesT, CodesColumnwise].map(|tensor| storage(tensor, Some(quant))), [codes; 3]);
            assert_eq!(storage(X, Some(quant)), Some(DType::F16.into()));
        }
        let scales = [Some(&row), Some(&mx), None].map(|quant| storage(Scales, quant));
        assert_eq!(scales, [Some(DType::F32.into()), Some(Storage::E8m0), None]);
        // The storage follows the layout of each copy.
        let power = ScaleKind::Block { cols: 128, is_power_of_two: true };
        let packed = QuantSpec::new(CodeType::E5m2, power).columnwise_layout(ScaleLayout::PackedUe8m0 { ld: 8 });
        let storages = [Scales, ScalesColumnwise].map(|tensor| storage(tensor, Some(&packed)));
        assert_eq!(storages, [Some(DType::F32.into()), Some(Storage::E8m0)]);
        assert_eq!((storage(Codes, None), storage(Weight, None)), (None, Some(DType::F32.into())));

        let with = |shape| Tensor::ALL.into_iter().filter(|t| t.shape() == shape).collect::<TensorSet>();
        assert_eq!(with(TensorShape::Cols), TensorSet::of(&[Weight, Bias, Dweight, Dbias, NextWeight, NextBias]));
        assert_eq!(with(TensorShape::Rows), TensorSet::of(&[Mean, Rstd, NextMean, NextRstd]));
        assert_eq!(with(TensorShape::Workspace), TensorSet::of(&[Workspace]));
        let of_rows = [X, Residual, Y, ResidualOut, Dy, DresidualOut, Dx, Dresidual, Codes, Gate, Dgate];
        assert_eq!(with(TensorShape::Matrix), TensorSet::of(&of_rows));
        assert_eq!(TensorSet::MATRICES, TensorSet::of(&of_rows).with(CodesT).with(CodesColumnwise));
        assert_eq!(with(TensorShape::Transposed), TensorSet::of(&[CodesT, CodesColumnwise]));
        assert_eq!(with(TensorShape::One), TensorSet::of(&[Scale, Amax]));
        assert_eq!(with(TensorShape::Scales), TensorSet::of(&[Scales]));
        assert_eq!(with(TensorShape::ScalesColumnwise), TensorSet::of(&[ScalesColumnwise]));
    }

    #[test]
    fn sets_hold_what_was_put_into_them() {
        use Tensor::*;
        let set = TensorSet::of(&[Y, Weight]);
        assert_eq!(set.iter().collect::<Vec<_>>(), [Weight, Y]);
        assert_eq!(format!("{set:?}"), "{\"weight\", \"y\"}");
        assert_eq!(set.with(X).without(Y), TensorSet::of(&[X, Weight]));
        assert_eq!((set.with(Y), set.without(X)), (set, set), "as it was already");
        assert_eq!(set.set(Y, false).set(Workspace, true), TensorSet::of(&[Weight, Workspace]));
        assert_eq!(set.intersection(TensorSet::of(&[Y, Bias])), TensorSet::of(&[Y]));
        assert_eq!(set.union(TensorSet::of(&[Y, Bias])), TensorSet::of(&[Y, Weight, Bias]));
        assert_eq!(set.difference(TensorSet::of(&[Y, Bias])), TensorSet::of(&[Weight]));
        assert_eq!(TensorSet::of(&Tensor::ALL).iter().collect::<Vec<_>>(), Tensor::ALL);
        assert_eq!(TensorSet::NONE.iter().count(), 0);
        assert_eq!(Tensor::ALL.into_iter().filter(|&t| TensorSet::of(&Tensor::ALL).has(t)).count(), Tensor::COUNT);

        assert!(TensorSet::NONE.is_empty() && !set.is_empty());
        assert!(set.is_in_place() && !set.with(X).is_in_place() && !TensorSet::of(&[X, Dx]).is_in_place());
        assert!(TensorSet::of(&[ResidualOut]).adds_residual() && TensorSet::of(&[Residual]).adds_residual());
        let cast = TensorSet::of(&[Residual, Y]);
        assert!(cast.is_cast() && !cast.is_in_place() && !cast.adds_residual() && !cast.with(X).is_cast());
        let backward = TensorSet::of(&[X, Dy, Dresidual]);
        assert!(backward.is_cast() && !backward.with(Dx).is_cast() && !TensorSet::of(&[Y, ResidualOut]).is_cast());
        assert!(!TensorSet::of(&[X, Y, DresidualOut]).adds_residual());
        let counts = [TensorSet::NONE, TensorSet::of(&[Dbias]), TensorSet::of(&[Dweight, Dbias])];
        assert_eq!(counts.map(TensorSet::sums_over_rows), [0, 1, 2]);
    }
}
