//! Calls whose columns are divided among ranks. The joined outputs are judged as those of one
//! device. Outputs per row must have the same bits on every rank.
//!
//! Ranks with different means ([`ColumnsCase::apart`]) test how variances are merged.

use std::fmt;

use rmsnorm_spec::depth::sum_depth;
use rmsnorm_spec::reference::round_to;
use rmsnorm_spec::{DType, GradReduction, Norm, Tensor, TensorSet, TensorShape};

use super::{Divided, Group, RanksSummary, judged, rank_call, same_on_ranks};
use crate::Arithmetic;
use crate::case::Family;
use crate::case::data::{self, Inputs};
use crate::case::dice::{Dice, each, is_meaningful};
use crate::case::presence::ALL_PRESENT;
use crate::case::{Case, Kind, Layout};
use crate::finding::Status;
use crate::run::calls::Scenario;
use crate::run::harness::Answer;
use crate::run::memory::{Bits, Call, Poison};
use crate::testing::TestFailure;

/// How the columns are divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// Evenly; the first ranks have one column more if needed.
    Even,
    /// The same number for each rank, except that the last ranks have fewer.
    LastHasFewer,
    /// One column for the first rank, the others evenly.
    FirstHasOne,
}

impl Split {
    const ALL: [Split; 3] = [Split::Even, Split::LastHasFewer, Split::FirstHasOne];

    /// The columns of each rank. `None` if a rank would have none.
    fn columns(self, cols: usize, ranks: usize) -> Option<Vec<usize>> {
        let even =
            |cols: usize, ranks: usize| (0..ranks).map(move |rank| cols / ranks + usize::from(rank < cols % ranks));
        let columns: Vec<usize> = match self {
            Split::Even => even(cols, ranks).collect(),
            Split::LastHasFewer => {
                let most = cols.div_ceil(ranks);
                (0..ranks).map(|rank| most.min(cols.saturating_sub(rank * most))).collect()
            }
            Split::FirstHasOne if ranks > 1 => {
                std::iter::once(1).chain(even(cols.saturating_sub(1), ranks - 1)).collect()
            }
            Split::FirstHasOne => vec![cols],
        };
        (!columns.contains(&0)).then_some(columns)
    }
}

/// A case of a group in which each rank has some of the columns.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ColumnsCase {
    /// The case of whole rows.
    pub case: Case,
    /// The number of ranks.
    pub ranks: usize,
    /// How the columns are divided.
    pub split: Split,
    /// Whether each rank's columns have a different mean, far from zero, with small deviations from
    /// it.
    pub apart: bool,
}

impl ColumnsCase {
    /// The columns of each rank.
    fn columns(&self) -> Vec<usize> {
        self.split.columns(self.case.cols, self.ranks).unwrap_or_default()
    }
}

/// Longest chain of additions in the statistics of layer norm, on at most `RANKS` ranks, if one
/// rank has nearly all columns.
fn merged_depth<const RANKS: usize>(cols: usize) -> usize {
    3 * (sum_depth(cols) + 3 * RANKS + 4)
}

/// Mean of rank 0 if the ranks' means differ. With a larger mean, the rounding of a rank's mean
/// would matter in its distance to the row's mean.
const MEAN: f64 = 1500.0;

impl fmt::Display for ColumnsCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ColumnsCase { case, ranks, split, apart } = self;
        let apart = if *apart { " apart" } else { "" };
        write!(f, "columns of {ranks} ranks {split:?}{apart}, {case}")
    }
}

/// The cases of a group with `ranks` ranks.
pub fn cases(ranks: usize, is_whole: bool) -> Vec<ColumnsCase> {
    let mut dice = Dice { state: 51 + ranks as u64 };
    let mut cases = Vec::new();
    let kinds = [Kind::FORWARD, Kind::FORWARD_IN_PLACE, Kind::BACKWARD];
    let rounds = if is_whole { 4 } else { 1 };
    for (norm, (i, kind)) in each(Norm::USUAL, kinds.into_iter().enumerate()) {
        for ((j, &family), round) in each(Family::OF_FLOATS.iter().enumerate(), 0..rounds) {
            let mut drawn = || {
                let case = Case { kind, norm, family, ..dice.case(1 << 12) };
                of_columns(case, ranks, Split::ALL[(i + j + round) % 3])
            };
            cases.extend((0..64).find_map(|_| drawn()));
        }
        // One column per rank (the minimum); the columns of a few heads; no rows; and more rows.
        let sizes = [(5, ranks), (3, 129), (0, 64), (70, 64 * ranks)];
        for ((j, dtype), (rows, cols)) in each(DType::ALL.into_iter().enumerate(), sizes) {
            let case = Case { present: ALL_PRESENT, ..Case::plain(kind, norm, dtype, rows, cols) };
            cases.extend(of_columns(case, ranks, Split::ALL[j]));
        }
    }
    for (kind, cols) in each([Kind::FORWARD, Kind::FORWARD_IN_PLACE], [32, 48, 256]) {
        let present = TensorSet::of(&[Tensor::Weight, Tensor::Mean, Tensor::Rstd]);
        let case = Case { present, ..Case::plain(kind, Norm::Layer, DType::F32, 33, cols) };
        cases.extend(of_columns(case, ranks, Split::Even).map(|case| ColumnsCase { apart: true, ..case }));
    }
    // L2 norms, whose sums over whole rows are not divided.
    let dtypes = DType::ALL.into_iter().enumerate();
    for (norm, ((i, kind), (j, dtype))) in
        each([Norm::L2, Norm::L2Clamped], each(kinds.into_iter().enumerate(), dtypes).collect::<Vec<_>>())
    {
        let family = [Family::Randn, Family::NearEps, Family::Mixed][(i + j) % 3];
        let case = Case { present: ALL_PRESENT, family, ..Case::plain(kind, norm, dtype, 5, 129) };
        cases.extend(of_columns(case, ranks, Split::ALL[(i + j) % 3]));
    }
    cases
}

/// The case with its columns divided, if that is possible and proves something.
fn of_columns(case: Case, ranks: usize, split: Split) -> Option<ColumnsCase> {
    let present = case.present.without(Tensor::Workspace);
    let case = Case { present, grad_reduction: GradReduction::Partials, ..case }.normalized();
    let is_good = is_meaningful(&case) && !matches!(case.layout, Layout::Far(_));
    (is_good && split.columns(case.cols, ranks).is_some()).then_some(ColumnsCase { case, ranks, split, apart: false })
}

/// Makes a case's calls from both poisons, and judges the outputs of all ranks.
pub fn run_case(group: &dyn Group, case: &ColumnsCase) -> Status {
    judged(group, case)
}

impl Divided for ColumnsCase {
    fn whole(&self) -> &Case {
        &self.case
    }

    fn inputs(&self) -> Inputs {
        let inputs = data::inputs(&self.case);
        let ranks: Vec<usize> =
            self.columns().iter().enumerate().flat_map(|(rank, &columns)| vec![rank; columns]).collect();
        let (cols, dtype) = (self.case.cols, self.case.x_dtype());
        let apart = |(i, x): (usize, &f64)| round_to(MEAN + ranks[i % cols] as f64 + x / 16.0, dtype);
        let x = self.apart.then(|| inputs.of(Tensor::X).iter().enumerate().map(apart).collect());
        let inputs = if let Some(x) = x { inputs.with(Tensor::X, Some(x)) } else { inputs };
        Scenario::of(&self.case, inputs).inputs
    }

    /// The ranks make chains of additions longer, and the bound
    /// of layer norm's statistics is that of a chain three times as long (math.md 5.5).
    fn arithmetic(&self, of_backend: Arithmetic) -> Arithmetic {
        let is_merged = self.case.norm == Norm::Layer && self.case.kind != Kind::BACKWARD;
        let depth_cols: fn(usize) -> usize = match self.ranks {
            _ if !is_merged => sum_depth,
            0..=2 => merged_depth::<2>,
            3..=4 => merged_depth::<4>,
            5..=8 => merged_depth::<8>,
            _ => merged_depth::<64>,
        };
        Arithmetic { depth_cols, ..of_backend }
    }

    fn call(&self, rank: usize, inputs: &Inputs, poison: Poison) -> Call {
        let (of_ranks, cols) = (self.columns(), self.case.cols);
        let (start, columns) = (of_ranks[..rank].iter().sum::<usize>(), of_ranks[rank]);
        let part = |tensor: Tensor, values: &[f64]| {
            let row = |row: &[f64]| row[start..][..columns].to_vec();
            let has_columns = [TensorShape::Matrix, TensorShape::Cols].contains(&tensor.shape());
            has_columns.then(|| values.chunks(cols).flat_map(row).collect())
        };
        rank_call(&Case { cols: columns, ..self.case }, &inputs.clone().map(part), poison)
    }

    fn make(&self, group: &dyn Group, calls: &mut [Call]) -> Vec<Answer> {
        group.make_on_columns(&self.case.spec(), &self.columns(), self.case.dtypes, calls)
    }

    fn join(&self, tensor: Tensor, of_ranks: &[&Bits], _: &[Call]) -> Result<Vec<u32>, Status> {
        if tensor.shape() == TensorShape::Rows {
            return same_on_ranks(tensor, of_ranks);
        }
        // A vector counts as one row.
        let rows = if tensor.is_matrix() { self.case.rows } else { 1 };
        let of_rank =
            |row: usize| move |(bits, columns): (&&Bits, usize)| bits.bits[row * columns..][..columns].to_vec();
        Ok((0..rows).flat_map(|row| of_ranks.iter().zip(self.columns()).flat_map(of_rank(row))).collect())
    }

    fn may_be_refused(&self) -> bool {
        true
    }
}

/// Runs the cases of a group: many, or a few. `progress` is as in [`ranks::run`](super::run).
pub fn run(group: &dyn Group, is_whole: bool, progress: &mut dyn FnMut(usize, usize)) -> RanksSummary {
    RanksSummary::of(group, &cases(group.ranks(), is_whole), progress)
}

/// [`run`] as a test of a group that must support all cases; returns the number of passed cases.
///
/// # Errors
/// All failed cases; or if no case passed, or some case is not supported.
pub fn test_columns(group: &dyn Group, is_whole: bool) -> Result<usize, TestFailure> {
    let summary = run(group, is_whole, &mut |_, _| {});
    match summary.unsupported {
        0 => summary.tested(),
        _ => Err(TestFailure(summary.to_string())),
    }
}
