//! Ranks in several processes: this test program starts itself once for each rank, each on its own
//! GPU if there are enough, otherwise all on one.
//!
//! Processes take turns on one GPU, so a kernel that waits for another process takes some
//! milliseconds.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio, exit};
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use rmsnorm_conformance::testing::{available, skip_or_fail};
use rmsnorm_cuda::cudarc::driver::CudaContext;
use rmsnorm_cuda::spec::{Error, NormSpec, bf16};
use rmsnorm_cuda::{CudaBackend, MissingRank, NcclComm, NcclId, PeerCard, PeerGroup, PeerSeat};

use crate::case::{Case, Data};
use crate::machine::Machine;
use crate::tensors::Tensors;

/// The task of a started process: `rank ranks device what folder`.
const PART: &str = "RMSNORM_TEST_PEER";

/// Longer than the delay between ranks that have just met.
const DEADLINE: Duration = Duration::from_secs(10);

/// Longer than any step here takes.
const PATIENCE: Duration = Duration::from_secs(100);

/// The scenarios; in `Calls` and `Over` every case must pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    Calls,
    /// Rank 1 exits without a message.
    Death,
    /// Rank 1 passes other `bytes`.
    Mixed,
    /// As `Calls`, over NCCL.
    Over,
    /// As `Mixed`, over NCCL.
    MixedOver,
}

const WHATS: [What; 5] = [What::Calls, What::Death, What::Mixed, What::Over, What::MixedOver];

/// The place and the scenario of one process.
struct Part {
    rank: usize,
    ranks: usize,
    device: usize,
    what: What,
    folder: PathBuf,
}

impl Part {
    fn of_this_process() -> Option<Part> {
        let part = env::var(PART).ok()?;
        let words: Vec<&str> = part.splitn(5, ' ').collect();
        let number = |at: usize| words[at].parse().unwrap();
        Some(Part {
            rank: number(0),
            ranks: number(1),
            device: number(2),
            what: WHATS[number(3)],
            folder: words[4].into(),
        })
    }

    fn start(&self) -> Child {
        let Part { rank, ranks, device, what, folder } = self;
        Command::new(env::current_exe().unwrap())
            .args(["--exact", "processes::a_rank_that_was_started", "--nocapture", "--test-threads=1"])
            .env(PART, format!("{rank} {ranks} {device} {} {}", *what as usize, folder.display()))
            .stdout(Stdio::null())
            .spawn()
            .unwrap()
    }

    fn file(&self, kind: &str, rank: usize) -> PathBuf {
        self.folder.join(format!("{kind}-{rank}"))
    }

    /// Leaves bytes for the others, in one atomic step.
    fn leave(&self, kind: &str, bytes: &[u8]) {
        let new = self.file(&format!("{kind}-new"), self.rank);
        fs::write(&new, bytes).unwrap();
        fs::rename(new, self.file(kind, self.rank)).unwrap();
    }

    /// Waits for the bytes that rank `rank` leaves.
    fn take(&self, kind: &str, rank: usize) -> Vec<u8> {
        let start = Instant::now();
        loop {
            match fs::read(self.file(kind, rank)) {
                Ok(bytes) => return bytes,
                Err(error) => assert!(start.elapsed() < PATIENCE, "rank {rank} has left no {kind}: {error}"),
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn meet(&self, place: &str) {
        self.leave(place, &[]);
        (0..self.ranks).for_each(|rank| drop(self.take(place, rank)));
    }

    fn bytes(&self) -> usize {
        let most = cases(self.ranks).iter().map(|case| case.bytes).max().unwrap();
        let is_other = matches!(self.what, What::Mixed | What::MixedOver) && self.rank == 1;
        if is_other { 2 * most } else { most }
    }
}

/// One row, more rows than blocks, and a row in shared memory.
fn cases(ranks: usize) -> [Case; 3] {
    [
        Case::new(ranks, NormSpec::rms(1, 4096, 1e-6)),
        Case { gap: 8, is_in_place: true, ..Case::new(ranks, NormSpec::layer(300, 1000, 1e-5)) },
        Case { seed: 2, ..Case::new(ranks, NormSpec::rms(3, 40_001, 1e-6)) },
    ]
}

/// The rank that an error names.
fn named(result: Result<(), Error>) -> Option<usize> {
    match result {
        Err(Error::Device { source, .. }) => source.downcast_ref::<MissingRank>().map(MissingRank::missing),
        Ok(()) | Err(_) => None,
    }
}

/// Runs in each started process.
#[test]
fn a_rank_that_was_started() {
    let Some(part) = Part::of_this_process() else { return };
    let context = CudaContext::new(part.device).unwrap();
    let backend = CudaBackend::from_stream(context.new_stream().unwrap()).unwrap();
    let joined = match part.what {
        What::Calls | What::Death | What::Mixed => join(&part, &backend),
        What::Over | What::MixedOver => join_over(&part, &backend),
    };
    if let What::Mixed | What::MixedOver = part.what {
        // Rank 1 names rank 0, all others name rank 1.
        let (other, rule) = (usize::from(part.rank != 1), joined.unwrap_err().to_string());
        assert!(rule.contains(&format!("rank {other} has bytes = ")), "{rule}");
        return;
    }
    let group = joined.unwrap().deadline(PATIENCE);
    for (number, case) in cases(part.ranks).iter().enumerate() {
        check(&part, &backend, &group, number, case);
    }
    if part.what == What::Death {
        die(&part, &backend, group);
    }
}

/// Makes the group, through files.
fn join(part: &Part, backend: &CudaBackend) -> Result<PeerGroup, Error> {
    let seat = PeerSeat::new(backend, part.rank, part.ranks, part.bytes())?;
    part.leave("card", seat.card().as_bytes());
    let card = |rank| PeerCard::from_bytes(part.take("card", rank).try_into().unwrap());
    seat.join(&(0..part.ranks).map(card).collect::<Vec<_>>())
}

/// Makes the group over a communicator, which is dropped before the first call.
fn join_over(part: &Part, backend: &CudaBackend) -> Result<PeerGroup, Error> {
    if part.rank == 0 {
        part.leave("id", NcclComm::unique_id()?.as_bytes());
    }
    let id = NcclId::from_bytes(part.take("id", 0).try_into().unwrap());
    let comm = NcclComm::from_rank(backend.stream().clone(), part.rank, part.ranks, id)?;
    PeerGroup::over(backend, &comm, part.bytes())
}

/// Runs the case several times, and judges the result on this rank.
fn check(part: &Part, backend: &CudaBackend, group: &PeerGroup, number: usize, case: &Case) {
    let data = Data::<bf16, bf16, bf16>::new(case);
    let mut tensors = Tensors::new(backend, case, &data, part.rank);
    tensors.prepare(group).unwrap();
    part.meet(&format!("before-{number}"));
    // In place, a second call would have other data.
    (0..if case.is_in_place { 1 } else { 5 }).for_each(|_| tensors.call(group).unwrap());
    backend.stream().synchronize().unwrap();
    group.check().unwrap();
    data.judge(backend, case, &[tensors.output(backend)]);
    part.leave(&format!("output-{number}"), &tensors.bytes(backend).concat());
    part.meet(&format!("after-{number}"));
}

/// Rank 1 ends; the others name it, and drop their groups.
fn die(part: &Part, backend: &CudaBackend, group: PeerGroup) {
    let case = &cases(part.ranks)[0];
    let data = Data::<bf16, bf16, bf16>::new(case);
    let mut tensors = Tensors::new(backend, case, &data, part.rank);
    if part.rank == 1 {
        // Drops neither the group nor the context.
        exit(0);
    }
    let group = group.deadline(DEADLINE);
    part.leave("ready", &[]);
    (0..part.ranks).filter(|rank| *rank != 1).for_each(|rank| drop(part.take("ready", rank)));
    tensors.call(&group).unwrap();
    backend.stream().synchronize().unwrap();
    // Two of the three ranks have sent their data.
    assert_eq!(named(group.check()), Some(1));
    assert_eq!(named(tensors.call(&group)), Some(1));
    part.leave("named", &[]);
    (0..part.ranks).filter(|rank| *rank != 1).for_each(|rank| drop(part.take("named", rank)));
}

/// Starts all ranks and waits until they have ended successfully.
fn run(machine: &Machine, ranks: usize, what: What, folder: &Path) {
    let device = |rank: usize| if ranks <= machine.devices() { rank } else { 0 };
    let part = |rank| Part { rank, ranks, device: device(rank), what, folder: folder.into() };
    let processes: Vec<Child> = (0..ranks).map(|rank| part(rank).start()).collect();
    for (rank, mut process) in processes.into_iter().enumerate() {
        let status = process.wait().unwrap();
        assert!(status.success(), "{what:?}: rank {rank} of {ranks}: {status}");
    }
}

/// Runs all cases. Each rank judges its own outputs; this compares them between ranks.
fn run_cases(machine: &Machine, ranks: usize, what: What) {
    let folder = tempfile::tempdir().unwrap();
    run(machine, ranks, what, folder.path());
    for number in 0..cases(ranks).len() {
        let output = |rank: usize| fs::read(folder.path().join(format!("output-{number}-{rank}"))).unwrap();
        assert!((1..ranks).all(|rank| output(rank) == output(0)), "{what:?}: case {number} of {ranks} ranks");
    }
}

#[test]
fn processes_are_ranks_as_good() {
    let Some(machine) = Machine::open() else { return };
    for ranks in [2, 3] {
        run_cases(&machine, ranks, What::Calls);
    }
}

/// NCCL does not allow two ranks on one GPU.
#[test]
fn a_communicator_is_all_that_processes_need() {
    let Some(machine) = Machine::open() else { return };
    if available(NcclComm::version()).unwrap().is_none() {
        return;
    }
    if machine.devices() < 2 {
        skip_or_fail("nccl-2", "needs 2 GPUs, there is one").unwrap();
        return;
    }
    run_cases(&machine, 2, What::Over);
    let folder = tempfile::tempdir().unwrap();
    run(&machine, 2, What::MixedOver, folder.path());
}

#[test]
fn a_process_that_ends_is_named_by_the_others() {
    let Some(machine) = Machine::open() else { return };
    for ranks in [2, 3] {
        let folder = tempfile::tempdir().unwrap();
        run(&machine, ranks, What::Death, folder.path());
    }
}

#[test]
fn processes_that_are_no_group_are_refused_on_each() {
    let Some(machine) = Machine::open() else { return };
    let folder = tempfile::tempdir().unwrap();
    run(&machine, 3, What::Mixed, folder.path());
}

/// Two ranks in one process cannot form a group of processes, and a rank must be in range.
#[test]
fn seats_that_cannot_be_are_refused() {
    let Some(machine) = Machine::open() else { return };
    let backends = machine.on_one(2);
    let seats = [0, 1].map(|rank| PeerSeat::new(&backends[rank], rank, 2, 1024).unwrap());
    let cards = seats.each_ref().map(|seat| *seat.card());
    let [first, second] = seats;
    let refused = |seat: PeerSeat, cards: &[PeerCard]| match seat.join(cards) {
        Err(Error::InvalidArgument { arg: "cards", rule }) => rule,
        other => panic!("{other:?}"),
    };
    assert!(refused(first, &cards).contains("ranks 0 and 1 share one"));
    assert!(refused(second, &cards[..1]).contains("expected 2 cards, one per rank, got 1"));
    let out_of_range = PeerSeat::new(&backends[0], 2, 2, 1024).unwrap_err().to_string();
    assert!(out_of_range.contains("less than 2, the number of ranks, got 2"), "{out_of_range}");
    assert!(PeerSeat::new(&backends[0], 0, 9, 1024).is_err());
    // A group may have one rank, and a seat may be dropped.
    let group = PeerSeat::new(&backends[0], 0, 1, 1 << 20).unwrap();
    let card = *group.card();
    let group = group.join(&[card]).unwrap();
    let case = Case::new(1, NormSpec::rms(3, 512, 1e-6));
    let data = Data::<bf16, bf16, bf16>::new(&case);
    let mut tensors = Tensors::new(&backends[0], &case, &data, 0);
    tensors.call(&group).unwrap();
    backends[0].stream().synchronize().unwrap();
    data.judge(&backends[0], &case, &[tensors.output(&backends[0])]);
}
