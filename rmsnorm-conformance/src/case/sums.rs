//! Cases with gradients of weight and bias as f32 sums.

use rmsnorm_spec::{DType, DTypes, Norm, Tensor, TensorSet};

use crate::case::Family;
use crate::case::dice::{Dice, Lists, drawn, each, is_meaningful};
use crate::case::presence::ALL_PRESENT;
use crate::case::{Case, Kind, Layout};

/// The usual tensors in training.
const USUAL: TensorSet = TensorSet::of(&[Tensor::Weight, Tensor::Dweight, Tensor::Dbias]);

fn plain(norm: Norm, dtype: DType, (rows, cols): (usize, usize)) -> Case {
    Case { present: USUAL, ..Case::plain(Kind::BACKWARD_SUMS, norm, dtype, rows, cols) }
}

/// The cases with gradients of weight and bias as f32 sums.
pub(crate) const LISTS: Lists = Lists { smoke, core, drawn: |seed| drawn(seed ^ 0x5d1b, 500, draw), ..Lists::NONE };

fn draw(dice: &mut Dice, _: usize) -> Option<Case> {
    let norm = dice.pick(&Norm::USUAL);
    one(dice, 1 << 13, |case| Case { norm, ..case })
}

/// Every norm and family with the other axes drawn, and every dtype.
fn smoke() -> Vec<Case> {
    let mut dice = Dice { state: 61 };
    let mut cases = Vec::new();
    for norm in Norm::USUAL {
        for &family in Family::OF_FLOATS {
            cases.extend(one(&mut dice, 1 << 12, |case| Case { norm, family, ..case }));
        }
        for dtype in DType::ALL {
            cases.push(plain(norm, dtype, (3, 129)));
            // More rows than one block of partial sums has, and no rows.
            cases.push(plain(norm, dtype, (300, 33)));
            cases.push(plain(norm, dtype, (0, 33)));
            let dtypes = DTypes::uniform(dtype).widened(true, true);
            cases.push(Case { dtypes, layout: Layout::Mixed(7), ..plain(norm, dtype, (5, 45)) });
        }
        for gradient in [Tensor::Dweight, Tensor::Dbias] {
            cases.push(Case { present: TensorSet::of(&[gradient]), ..plain(norm, DType::Bf16, (9, 40)) });
        }
    }
    cases.into_iter().map(Case::normalized).collect()
}

/// The cases of the core profile.
fn core() -> Vec<Case> {
    let mut dice = Dice { state: 62 };
    let mut cases = Vec::new();
    let presents = [(ALL_PRESENT, 37), (USUAL, 40), (USUAL.without(Tensor::Weight), 131)];
    for (i, norm) in Norm::USUAL.into_iter().enumerate() {
        for (&family, _) in each(Family::OF_FLOATS, 0..3) {
            cases.extend(one(&mut dice, 1 << 12, |case| Case { norm, family, ..case }));
        }
        for ((j, dtypes), (present, cols)) in each(DTypes::ALL.into_iter().enumerate(), presents) {
            let layout = Layout::Mixed((i * 9 + j) as u32);
            cases.push(Case { dtypes, present, layout, ..plain(norm, dtypes.activation, (21, cols)) });
        }
        for size in [(1, 1), (2, 4096), (3, 8193), (4100, 33), (65_537, 3), (2, 65_537), (1025, 1027)] {
            cases.extend(DType::ALL.map(|dtype| plain(norm, dtype, size)));
        }
    }
    cases.into_iter().map(Case::normalized).filter(is_meaningful).collect()
}

/// A drawn case, after `change`, that can prove something.
fn one(dice: &mut Dice, most: usize, change: impl Fn(Case) -> Case) -> Option<Case> {
    dice.one(most, |case| change(Case { kind: Kind::BACKWARD_SUMS, ..case }), is_meaningful)
}
