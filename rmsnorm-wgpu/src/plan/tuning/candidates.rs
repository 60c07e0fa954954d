//! Candidates worth measuring: packs per thread, the likely ones first.

use rmsnorm_tuning::Entry;

use super::data::Name;
use super::division;

/// Lists of packs that leave no thread idle, in the order of trial.
const WHOLE: [&[u32]; 8] = [&[3, 4, 2], &[2, 3, 4], &[1, 2], &[], &[4, 3, 2], &[1, 2, 3, 4], &[2, 4], &[5, 4, 3]];

/// Maximum threads for these lists.
const THREADS: [u32; 3] = [512, 1024, 256];

/// Candidate entries for a rung of a ladder.
pub(crate) fn entries(name: Name) -> Vec<Entry> {
    match name {
        Name::Forward(_) | Name::ToCodes => {
            [4, 5, 8, 2, 3, 6, 7, 1].map(|packs| Entry::none().with("packs", packs)).to_vec()
        }
        Name::Backward(_) => {
            let divisions = THREADS.into_iter().flat_map(|threads| {
                [4, 5, 2, 3, 1]
                    .into_iter()
                    .flat_map(move |most| WHOLE.iter().map(move |whole| division(whole, threads, most)))
            });
            divisions.map(|division| division.to_entry()).collect()
        }
    }
}
