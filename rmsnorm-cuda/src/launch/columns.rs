//! The two phases of a call on column-divided rows: math.md, equations (15) to (18). Their plans
//! are made in `plan/columns.rs`. Their kernels have a second argument, [`Columns`].

use cudarc::driver::{CudaView, CudaViewMut, DeviceSlice};
use rmsnorm_spec::{Error, GradReduction, NormSpec, Problem};

use super::{Tensors, access_bytes, enqueue_plan};
use crate::backend::CudaBackend;
use crate::params::{Columns, MOST_COLUMN_RANKS};
use crate::plan;

/// The data of a phase that is not in `Params`.
pub(super) struct Half {
    pub(super) columns: Columns,
    /// The number of columns of all ranks together.
    pub(super) whole_cols: usize,
}

/// Enqueues the first phase, which writes this rank's `statistics`.
pub(super) fn first(
    backend: &CudaBackend,
    spec: &NormSpec,
    problem: &Problem,
    tensors: &Tensors<'_>,
    statistics: CudaViewMut<'_, f32>,
) -> Result<(), Error> {
    tensors.check_context("statistics", statistics.stream())?;
    // cudarc treats the view as in use until the work is enqueued.
    let (numbers, _in_use) = statistics.view_ptr_mut(backend.stream());
    let half = Half { columns: of_ranks(numbers, &[problem.cols])?, whole_cols: problem.cols };
    let plan = plan::columns::statistics(problem, access_bytes(problem, &tensors.params()), backend.kernels().caps());
    enqueue_plan(backend, spec, problem, tensors, &plan, Some(&half))
}

/// Enqueues the second phase, which reads the statistics and the column counts of all ranks.
pub(super) fn second(
    backend: &CudaBackend,
    spec: &NormSpec,
    problem: &Problem,
    tensors: &Tensors<'_>,
    (statistics, columns): (CudaView<'_, f32>, &[usize]),
) -> Result<(), Error> {
    if problem.grad_reduction != GradReduction::Partials {
        let rule = "with columns divided among ranks, the cuda backend supports GradReduction::Partials only: set it";
        return Err(Error::Unsupported { rule: rule.into() });
    }
    tensors.check_context("statistics", statistics.stream())?;
    let (numbers, _in_use) = statistics.view_ptr(backend.stream());
    let half = Half { columns: of_ranks(numbers, columns)?, whole_cols: columns.iter().sum() };
    let plan = plan::columns::given(problem, access_bytes(problem, &tensors.params()), backend.kernels().caps());
    enqueue_plan(backend, spec, problem, tensors, &plan, Some(&half))
}

/// The `statistics` at address `numbers`, of ranks with `of_each` columns each.
///
/// # Errors
/// `Unsupported` for more ranks than [`Columns`] has room for.
pub(crate) fn of_ranks(numbers: u64, of_each: &[usize]) -> Result<Columns, Error> {
    let ranks = of_each.len();
    if ranks > MOST_COLUMN_RANKS {
        let rule = format!(
            "the cuda backend divides the columns of a row among at most {MOST_COLUMN_RANKS} ranks, got {ranks}"
        );
        return Err(Error::Unsupported { rule });
    }
    let mut columns = [0.0; MOST_COLUMN_RANKS];
    for (to, &from) in columns.iter_mut().zip(of_each) {
        *to = from as f32;
    }
    Ok(Columns { numbers, ranks: ranks as u32, unused: 0, columns })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_is_told_of_every_rank_or_the_call_is_refused() {
        let most: Vec<usize> = (1..=MOST_COLUMN_RANKS).collect();
        let columns = of_ranks(1, &most).expect("as many as there may be");
        assert_eq!((columns.numbers, columns.ranks), (1, 64));
        assert!(columns.columns.iter().zip(&most).all(|(got, &expected)| *got == expected as f32));
        let few = of_ranks(1, &[5, 7]).expect("two");
        assert_eq!((few.ranks, &few.columns[..3]), (2, &[5.0, 7.0, 0.0][..]));
        let refused = of_ranks(1, &[1; MOST_COLUMN_RANKS + 1]);
        assert!(matches!(refused, Err(Error::Unsupported { rule }) if rule.contains("at most 64 ranks, got 65")));
    }

    /// The name and bytes of every field of `struct Columns` in a source text; `parse` reads a
    /// line.
    fn fields<'a>(source: &'a str, parse: fn(&'a str) -> Option<(&'a str, usize)>) -> Vec<(&'a str, usize)> {
        let body = source.split_once("struct Columns {").expect("a struct").1.split_once("\n}").expect("its end").0;
        body.lines().filter_map(|line| parse(line.trim())).collect()
    }

    fn rust_field(line: &str) -> Option<(&str, usize)> {
        let (name, kind) = line.strip_prefix("pub(crate) ")?.strip_suffix(',')?.split_once(": ")?;
        let bytes = match kind {
            "[f32; MOST_COLUMN_RANKS]" => 4 * MOST_COLUMN_RANKS,
            "u64" => 8,
            "u32" => 4,
            _ => panic!("{line}: neither an address, nor numbers"),
        };
        Some((name, bytes))
    }

    fn cuda_field(line: &str) -> Option<(&str, usize)> {
        let (kind, name) = line.split_once(';')?.0.rsplit_once(' ')?;
        let bytes = if kind.ends_with('*') { 8 } else { 4 };
        match name.strip_suffix("[MOST_COLUMN_RANKS]") {
            Some(name) => Some((name, bytes * MOST_COLUMN_RANKS)),
            None => Some((name, bytes)),
        }
    }

    #[test]
    fn the_second_argument_is_the_same_on_both_sides() {
        let rust = fields(include_str!("../params.rs"), rust_field);
        assert_eq!(rust, fields(rmsnorm_kernels::COLUMNS.text, cuda_field));
        assert_eq!(rust.iter().map(|(_, bytes)| bytes).sum::<usize>(), size_of::<Columns>());
    }
}
