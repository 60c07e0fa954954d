//! Loaded tables: the rules of legal tables, and the properties of plans with any legal table.

use std::sync::OnceLock;

use rmsnorm_gpu::plan_tests;
use rmsnorm_gpu::testing::Draw;
use rmsnorm_gpu::testing::plans::Planner;
use rmsnorm_gpu::tuning::Rung;
use rmsnorm_tuning::{Entry, Table};

use super::super::Tuning;
use super::super::tuning::KEPT;
use super::super::tuning::data::{Name, Which};
use super::super::tuning::legal::check_ladder;
use super::*;

#[test]
fn what_is_built_in_is_legal_and_reads_back() {
    let table = Tuning::H200.to_table();
    let read = |table: &Table| Tuning::from_table(table).map(|tuning| tuning == *Tuning::H200);
    assert_eq!(read(&table), Ok(true));
    assert_eq!(read(&toml::from_str(&table.to_string()).expect("a table")), Ok(true));
}

/// The built-in table with this entry for the rung up to `up_to`.
fn with(ladder: &str, up_to: u32, entry: Entry) -> Result<Tuning, String> {
    let mut table = Tuning::H200.to_table();
    let mut rungs = table.ladders.get_mut(ladder).expect("a ladder").iter_mut();
    rungs.find(|rung| rung.up_to == up_to).expect("a rung").best = entry;
    Tuning::from_table(&table)
}

/// The numbers of an entry, with their names.
type Numbers = &'static [(&'static str, u32)];

fn entry(numbers: Numbers) -> Entry {
    numbers.iter().fold(Entry::none(), |entry, (name, number)| entry.with(name, *number))
}

#[test]
fn what_no_kernel_takes_is_refused_with_the_reason() {
    const BLOCK: &str = "16.forward.rms.block";
    const CLUSTER: &str = "16.forward.rms.cluster";
    const LONG: &str = "16.forward.rms.long";
    const BACKWARD: &str = "16.backward.one_sum.block";
    const CLUSTERS: &str = "16.backward.one_sum.cluster";
    const CODES: &str = "16.to_codes.tensor";
    let cases: &[(&str, u32, Numbers, &str)] = &[
        (BLOCK, 512, &[("threads", 256)], "blocks is missing"),
        (BLOCK, 512, &[("threads", 256), ("blocks", 8), ("colour", 1)], "unknown name \"colour\""),
        (BLOCK, 512, &[("threads", 0), ("blocks", 8)], "threads are from 1 to 1024"),
        (BLOCK, 512, &[("threads", u32::MAX), ("blocks", 8)], "threads are from 1 to 1024"),
        (BLOCK, 512, &[("threads", 48), ("groups", 2), ("blocks", 8)], "a power of two or a multiple of 32"),
        (BLOCK, 512, &[("threads", 128), ("groups", 3), ("blocks", 1)], "groups are a power of two"),
        (BLOCK, 512, &[("threads", 128), ("groups", u32::MAX), ("blocks", 1)], "groups are a power of two"),
        (BLOCK, 512, &[("threads", 1024), ("groups", 2), ("blocks", 1)], "up to 1024 threads"),
        (BLOCK, 1, &[("threads", 1), ("groups", 16), ("blocks", 1)], "whole warps"),
        (BLOCK, 512, &[("threads", 64), ("groups", 16), ("blocks", 1)], "up to 8 groups"),
        (BLOCK, 512, &[("threads", 256), ("blocks", 0)], "blocks are from 1 to 32"),
        (BLOCK, 512, &[("threads", 256), ("blocks", u32::MAX)], "blocks are from 1 to 32"),
        (BLOCK, 512, &[("threads", 256), ("blocks", 9)], "up to 2048"),
        (BLOCK, 512, &[("threads", 256), ("unroll", 3), ("blocks", 1)], "unroll is 1, 2"),
        (BLOCK, 512, &[("threads", 256), ("stages", 2), ("blocks", 1)], "forward has no stages"),
        (BLOCK, 512, &[("threads", 256), ("cluster", 2), ("blocks", 1)], "a ladder of clusters has clusters"),
        (BLOCK, 512, &[("threads", 32), ("blocks", 1)], "16 packs of a thread are more than 8"),
        (BLOCK, 512, &[], "it has no tile"),
        (BLOCK, 512, &[("threads", 256), ("overlapped", 2), ("blocks", 1)], "overlapped must be 0 or 1, got 2"),
        (CLUSTER, 4096, &[("threads", 256), ("cluster", 3), ("blocks", 1)], "a power of two up to 8"),
        (CLUSTER, 4096, &[("threads", 256), ("cluster", 16), ("blocks", 1)], "a power of two up to 8"),
        (CLUSTER, 4096, &[("threads", 256), ("cluster", 2), ("groups", 2), ("blocks", 1)], "has one row"),
        (CLUSTER, 4096, &[("threads", 256), ("cluster", 2), ("unroll", 2), ("blocks", 1)], "unroll is 1 here"),
        (CLUSTER, 2048, &[("threads", 256), ("cluster", 2), ("blocks", 1)], "this length belongs to another ladder"),
        (LONG, 32768, &[("threads", 128), ("cluster", 8), ("blocks", 8)], "32 packs"),
        (LONG, 32768, &[("threads", 512), ("cluster", 8), ("groups", 2), ("blocks", 1)], "has one row"),
        (CODES, 512, &[("threads", 128), ("unroll", 2), ("blocks", 1)], "unroll is 1 here"),
        (CODES, 128, &[("threads", 64), ("blocks", 16)], "as many threads as in 16.to_codes.tensor"),
        (BACKWARD, 512, &[("threads", 256), ("blocks", 1)], "stages are from 2 to 4"),
        (BACKWARD, 512, &[("threads", 256), ("stages", 1), ("blocks", 1)], "stages are from 2 to 4"),
        (BACKWARD, 512, &[("threads", 64), ("stages", 2), ("blocks", 1)], "128 threads at least"),
        (BACKWARD, 512, &[("threads", 256), ("stages", 2), ("blocks", 3)], "768 blocks with rows of their own"),
        (
            BACKWARD,
            512,
            &[("threads", 128), ("groups", 8), ("unroll", 2), ("stages", 2), ("blocks", 1)],
            "packs of a block",
        ),
        (CLUSTERS, 16384, &[("threads", 1024), ("cluster", 8), ("stages", 2), ("blocks", 2)], "128 sums"),
    ];
    for (ladder, up_to, numbers, words) in cases {
        match with(ladder, *up_to, entry(numbers)) {
            Err(reason) => assert!(reason.contains(words) && reason.contains(ladder), "{reason}: {words}"),
            Ok(_) => panic!("{ladder} {up_to} {numbers:?} is taken"),
        }
    }
}

#[test]
fn what_is_no_table_of_this_backend_is_refused() {
    let refused = |change: fn(&mut Table)| {
        let mut table = Tuning::H200.to_table();
        change(&mut table);
        Tuning::from_table(&table).expect_err("no table")
    };
    let long = "16.forward.rms.long";
    assert!(refused(|table| drop(table.ladders.remove("16.finds_scale"))).contains("no ladder \"16.finds_scale\""));
    assert!(
        refused(|table| drop(table.ladders.insert("17".into(), vec![]))).contains("unknown ladder or number \"17\"")
    );
    assert!(refused(|table| table.numbers.clear()).contains("no number \"split_bytes\""));
    assert!(
        refused(|table| *table.numbers.entry("split_bytes".into()).or_default() = u64::MAX).contains("split_bytes is")
    );
    let falls = refused(|table| {
        let rungs = table.ladders.get_mut("16.forward.rms.long").expect("a ladder");
        rungs.swap(0, 1);
    });
    assert_eq!(falls, format!("{long}: its limits do not rise"));
}

/// A table with random rungs, of which only the legal ones are kept.
fn drawn(seed: u64) -> &'static Tuning {
    let mut draw = Draw::new(seed);
    let mut table = Tuning::H200.to_table();
    for name in Name::all().into_iter().filter(|name| name.which != Which::FindsScale) {
        let mut rungs = Tuning::H200.ladder(name).to_vec();
        for rung in 0..rungs.len() {
            let Some(before) = rungs[rung].best else { continue };
            let tile = |draw: &mut Draw| Tile {
                threads_per_row: draw.of([1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 224, 256, 352, 512, 768, 1024]),
                groups: draw.of([1, 1, 1, 2, 4, 8, 32, 128]),
                cluster: draw.of([1, 1, 2, 4, 8]),
                unroll: draw.of([1, 1, 2, 4]),
                stages: draw.of([0, 2, 3, 4]),
                is_overlapped: draw.of([false, false, false, true]),
                blocks_per_sm: draw.of([1, 1, 2, 3, 4, 8, 16, 32]),
                ..Tile::NONE
            };
            for _ in 0..60 {
                rungs[rung].best = Some(tile(&mut draw));
                if check_ladder(name, &rungs, Tuning::H200.ladder(name)).is_ok() {
                    break;
                }
                rungs[rung].best = Some(before);
            }
        }
        let mut tuning = Tuning::H200.clone();
        *tuning.ladder_mut(name) = rungs.into();
        let text = name.text();
        let changed = tuning.to_table().ladders.remove(&text).expect("a ladder");
        let before = table.ladders.insert(text.clone(), changed).expect("a ladder");
        // The search of the scale keeps its threads, so some kernels that write codes must keep
        // theirs.
        if Tuning::from_table(&table).is_err() {
            table.ladders.insert(text, before);
        }
    }
    table.numbers.insert("split_bytes".into(), draw.of([0, 1 << 20, 10 << 20, 1 << 30]));
    KEPT.keep(Tuning::from_table(&table).expect("each rung is legal"))
}

/// Like [`Plans`], with random tables.
struct Drawn;

impl Drawn {
    fn tables() -> &'static [&'static Tuning] {
        static TABLES: OnceLock<Vec<&'static Tuning>> = OnceLock::new();
        TABLES.get_or_init(|| (0..3).map(drawn).collect())
    }
}

/// Each device with another table.
pub(crate) fn drawn_devices() -> Vec<Caps> {
    DEVICES.into_iter().zip(Drawn::tables()).map(|(caps, tuning)| Caps { tuning, ..caps }).collect()
}

impl Planner for Drawn {
    type Caps = Caps;
    type Access = u32;
    type Plan = Plan;
    type Mapping = <Plans as Planner>::Mapping;

    const ACCESSES: &'static [u32] = &[16];
    const ROWS: &'static [usize] = Plans::ROWS;
    const SOME_ROWS: usize = Plans::SOME_ROWS;
    const MOST_ELEMENTS: usize = Plans::MOST_ELEMENTS;

    fn devices() -> Vec<Caps> {
        drawn_devices()
    }

    fn calls() -> Vec<Call> {
        Plans::calls()
    }

    /// Every 13th of the short lengths, and two of three others; limits are those of the built-in
    /// table.
    fn cols() -> Vec<usize> {
        Plans::cols()
            .into_iter()
            .enumerate()
            .filter(|(n, cols)| if *cols <= 300 { n % 13 == 0 } else { n % 3 != 1 })
            .map(|(_, cols)| cols)
            .collect()
    }

    fn backward_sizes() -> Vec<(Call, usize, usize)> {
        Plans::backward_sizes().into_iter().step_by(11).collect()
    }

    fn is_sampled(call: Call, cols: usize) -> bool {
        cols.is_multiple_of(5) && Plans::is_sampled(call, cols)
    }

    fn must_fit(problem: &Problem, caps: &Caps) -> bool {
        Plans::must_fit(problem, caps)
    }

    fn plan(problem: &Problem, access: u32, caps: &Caps) -> Option<Plan> {
        Plans::plan(problem, access, caps)
    }

    fn workspace_len(problem: &Problem, caps: &Caps) -> usize {
        Plans::workspace_len(problem, caps)
    }

    fn programs(plan: &Plan) -> Vec<program::Program> {
        Plans::programs(plan)
    }

    fn mapping(plan: &Plan) -> Vec<Self::Mapping> {
        Plans::mapping(plan)
    }

    fn row_chains(plan: &Plan, cols: usize) -> Vec<(String, u64)> {
        Plans::row_chains(plan, cols)
    }

    fn gradient_chain(plan: &Plan, rows: usize) -> u64 {
        Plans::gradient_chain(plan, rows)
    }

    fn parts(plan: &Plan, call: Call, rows: usize, cols: usize) -> Parts {
        Plans::parts(plan, call, rows, cols)
    }

    fn zeroes(plan: &Plan) -> Vec<(usize, Range<u64>)> {
        Plans::zeroes(plan)
    }
}

plan_tests!(Drawn);

#[test]
fn tables_that_are_drawn_differ_from_the_built_in_one() {
    for tuning in Drawn::tables() {
        let changed = |name: &Name| {
            let both = tuning.ladder(*name).iter().zip(Tuning::H200.ladder(*name).iter());
            both.filter(|(one, other): &(&Rung<Tile>, _)| one != other).count()
        };
        let changed: usize = Name::all().iter().map(changed).sum();
        assert!(changed > 150, "{changed} rungs");
    }
}

#[test]
fn what_plans_by_any_legal_table_is_launched_as_devices_take_it() {
    properties::blocks_are_what_a_device_takes_of::<Drawn>();
    properties::shared_memory_suffices_of::<Drawn>();
    properties::every_column_has_one_thread_of::<Drawn>();
}

#[test]
fn the_workspace_bound_holds_for_any_legal_table() {
    for caps in Drawn::devices() {
        let caps = Caps { sms: 256, ..caps };
        for (call, rows, cols) in Plans::backward_sizes().into_iter().step_by(3) {
            let problem = call.problem(rows, cols);
            let (need, bound) = (workspace_len(&problem, &caps), workspace_len_bound(&problem));
            assert!(need <= bound, "{rows}x{cols} {call:?} on {caps:?}: {need} > {bound}");
        }
    }
}
