//! Loaded tables: which are valid, and that plans with any valid table have the properties of all
//! plans.

use std::sync::OnceLock;

use rmsnorm_gpu::plan_tests;
use rmsnorm_gpu::testing::Draw;
use rmsnorm_gpu::testing::plans::Planner;
use rmsnorm_tuning::{Entry, Table};

use super::super::{KEPT, Tuning};
use super::*;

#[test]
fn what_is_built_in_is_legal_and_reads_back() {
    let table = Tuning::H200.to_table();
    let read = |table: &Table| Tuning::from_table(table).map(|tuning| tuning == *Tuning::H200);
    assert_eq!(read(&table), Ok(true));
    assert_eq!(read(&toml::from_str(&table.to_string()).expect("a table")), Ok(true));
}

#[test]
fn what_no_shader_takes_is_refused_with_the_reason() {
    let packs = |packs| Entry::none().with("packs", packs);
    let division = |whole: &[u32], threads, most| {
        Entry::none().with_list("whole", whole).with("threads", threads).with("most", most)
    };
    for (ladder, entry, words) in [
        ("forward.rms", packs(0), "up to 96: packs is 0, which is not from 1 to 8"),
        ("forward.rms", packs(9), "packs is 9"),
        ("forward.layer", packs(u32::MAX), "packs is 4294967295"),
        ("forward.wide", packs(5), "packs is 5, which is not from 1 to 4"),
        ("backward.wide", division(&[1], 512, 5), "most is 5, which is not from 1 to 4"),
        ("backward.wide", Entry::none(), "rows of less than 1024 pairs of quads have no packs"),
        ("to_codes", Entry::none().with("most", 1), "unknown name \"most\""),
        ("backward.f16", packs(1), "unknown name \"packs\""),
        ("backward.f16", division(&[0], 512, 1), "whole is 0"),
        ("backward.f16", division(&[6], 512, 1), "whole is 6"),
        ("backward.f16", division(&[1; 6], 512, 1), "whole has 6 numbers"),
        ("backward.f16", division(&[1], 0, 1), "threads is 0"),
        ("backward.f16", division(&[1], 1025, 1), "threads is 1025"),
        ("backward.f16", division(&[1], 512, 0), "most is 0"),
        ("backward.f16", division(&[1], 512, 6), "most is 6"),
    ] {
        let mut table = Tuning::H200.to_table();
        table.ladders.get_mut(ladder).expect("a ladder")[0].best = entry;
        let reason = Tuning::from_table(&table).expect_err(words);
        assert!(reason.contains(words) && reason.contains(ladder), "{reason}: {words}");
    }
    let mut table = Tuning::H200.to_table();
    table.ladders.get_mut("forward.rms").expect("a ladder").swap(0, 1);
    assert_eq!(Tuning::from_table(&table), Err("forward.rms: its limits do not rise".into()));
    table.ladders.get_mut("forward.rms").expect("a ladder").clear();
    assert!(Tuning::from_table(&table).is_err_and(|reason| reason.ends_with("have no packs")));
    table.ladders.remove("forward.rms");
    assert_eq!(Tuning::from_table(&table), Err("it has no ladder \"forward.rms\"".into()));
    table.ladders.insert("forward.gms".into(), vec![]);
    assert_eq!(Tuning::from_table(&table), Err("unknown ladder or number \"forward.gms\"".into()));
}

/// A table with random rungs, some of them streaming.
fn drawn(seed: u64) -> &'static Tuning {
    let mut draw = Draw::new(seed);
    let mut table = Tuning::H200.to_table();
    for (name, rungs) in &mut table.ladders {
        let is_wide = name.ends_with("wide");
        let mut above = 0;
        for rung in rungs {
            let may_stream = std::mem::replace(&mut above, rung.up_to) >= 1023;
            let packs = if is_wide { draw.of([1, 2, 3, 4]) } else { draw.of([1, 2, 3, 4, 5, 6, 7, 8]) };
            let whole: Vec<u32> = (0..draw.of([0, 1, 2, 3, 5])).map(|_| draw.of([1, 2, 3, 4, 5])).collect();
            let threads = draw.of([1, 31, 32, 96, 128, 250, 256, 512, 544, 1000, 1024]);
            let most = if is_wide { draw.of([1, 2, 3, 4]) } else { draw.of([1, 2, 3, 4, 5]) };
            rung.best = match (name.starts_with("backward"), draw.of([0, 1, 2, 3, 4, 5])) {
                (_, 0) if may_stream => Entry::none(),
                (true, _) => Entry::none().with_list("whole", &whole).with("threads", threads).with("most", most),
                (false, _) => Entry::none().with("packs", packs),
            };
        }
    }
    KEPT.keep(Tuning::from_table(&table).expect("a legal table"))
}

/// As [`Plans`], with random tables.
struct Drawn;

impl Planner for Drawn {
    type Caps = Caps;
    type Access = Access;
    type Plan = Plan;
    type Mapping = <Plans as Planner>::Mapping;

    const ACCESSES: &'static [Access] = Plans::ACCESSES;
    const ROWS: &'static [usize] = Plans::ROWS;
    const SOME_ROWS: usize = Plans::SOME_ROWS;
    const MOST_ELEMENTS: usize = Plans::MOST_ELEMENTS;

    /// A different table for each device.
    fn devices() -> Vec<Caps> {
        static TABLES: OnceLock<Vec<&'static Tuning>> = OnceLock::new();
        let tables = TABLES.get_or_init(|| (0..DEVICES.len() as u64).map(drawn).collect());
        DEVICES.into_iter().zip(tables).map(|(caps, tuning)| Caps { tuning, ..caps }).collect()
    }

    fn devices_by_exchange() -> Vec<Caps> {
        let subgroups = [8, 32, 128].map(Some).into_iter().chain([None]);
        subgroups.flat_map(|subgroup| Drawn::devices().into_iter().map(move |caps| Caps { subgroup, ..caps })).collect()
    }

    fn calls() -> Vec<Call> {
        Plans::calls().into_iter().step_by(3).collect()
    }

    /// Every 13th of the short lengths, and all others.
    fn cols() -> Vec<usize> {
        let cols = Plans::cols().into_iter().enumerate();
        cols.filter(|(n, cols)| *cols > 300 || n % 13 == 0).map(|(_, cols)| cols).collect()
    }

    fn backward_sizes() -> Vec<(Call, usize, usize)> {
        Plans::backward_sizes().into_iter().step_by(11).collect()
    }

    fn devices_of_backward() -> Vec<Caps> {
        Drawn::devices()
    }

    fn is_sampled(call: Call, cols: usize) -> bool {
        Plans::is_sampled(call, cols)
    }

    fn must_fit(problem: &Problem, caps: &Caps) -> bool {
        Plans::must_fit(problem, caps)
    }

    fn plan(problem: &Problem, access: Access, caps: &Caps) -> Option<Plan> {
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

    fn as_if_not_in_place(plan: Plan) -> Plan {
        Plans::as_if_not_in_place(plan)
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

/// The suite's lengths follow from the limits of any table.
#[test]
fn lengths_of_the_suite_follow_any_table() {
    for caps in Drawn::devices() {
        assert!(!caps.tuning.cols_breakpoints().is_empty());
    }
}

/// The first step of `rmsnorm tune`: more limits, and the same plans.
#[test]
fn more_limits_with_the_same_entries_change_no_plan() {
    let mut table = Tuning::H200.to_table();
    for rungs in table.ladders.values_mut() {
        let halves = |rung: &rmsnorm_tuning::Rung| {
            let half = rmsnorm_tuning::Rung { up_to: rung.up_to / 2, ..rung.clone() };
            [half, rung.clone()]
        };
        *rungs = rungs.iter().flat_map(halves).collect();
        rungs.sort_by_key(|rung| rung.up_to);
        let mut above = 0;
        rungs.retain(|rung| std::mem::replace(&mut above, rung.up_to) < rung.up_to);
    }
    // A halved limit may be among shorter rungs, and must have their entry.
    for (name, rungs) in &mut table.ladders {
        let built_in = Tuning::H200.to_table();
        for rung in rungs {
            let first = built_in.ladders[name].iter().find(|known| known.up_to >= rung.up_to);
            rung.best = first.expect("a rung").best.clone();
        }
    }
    let tuning = KEPT.keep(Tuning::from_table(&table).expect("a legal table"));
    let caps = Caps { tuning, ..Caps::h200() };
    for call in Plans::calls() {
        for cols in Plans::cols().into_iter().step_by(7) {
            assert_eq!(call.plan(64, cols, &caps), call.plan(64, cols, &Caps::h200()), "{cols} {call:?}");
        }
    }
}
