//! Calls that are refused before anything is sent, and groups in memory of the caller.

use rmsnorm_conformance::Harness;
use rmsnorm_cuda::cudarc::driver::result;
use rmsnorm_cuda::spec::{Error, NormSpec, bf16};
use rmsnorm_cuda::{CudaBackend, Forward, PeerGroup};
use rmsnorm_dist::ShardedNorm;

use crate::case::{Case, Data};
use crate::machine::{Machine, on_each};
use crate::tensors::Tensors;

#[test]
fn groups_that_cannot_be_are_refused() {
    let Some(machine) = Machine::open() else { return };
    let backends = machine.on_one(2);
    let rule = |result: Result<Vec<PeerGroup>, Error>| match result {
        Err(Error::InvalidArgument { rule, .. }) => rule,
        other => panic!("{other:?}"),
    };
    assert!(rule(PeerGroup::in_process(&[], 1024)).contains("1 to 8 ranks, got 0"));
    assert!(rule(PeerGroup::in_process(&machine.on_one(9), 1024)).contains("got 9"));
    let one_stream = [backends[0].clone(), backends[0].clone()];
    assert!(rule(PeerGroup::in_process(&one_stream, 1024)).contains("ranks 0 and 1 have the same"));
    assert!(rule(PeerGroup::in_process(&backends, usize::MAX)).contains("more memory than any device has"));
}

/// The group still works after each refused call: nothing was sent.
#[test]
fn calls_that_have_no_form_are_refused_before_anything_is_sent() {
    let Some(machine) = Machine::open() else { return };
    let backends = machine.on_one(2);
    let case = Case::new(2, NormSpec::rms(3, 1024, 1e-6));
    let data = Data::<bf16, bf16, bf16>::new(&case);
    let outputs = on_each(PeerGroup::in_process(&backends, case.bytes).unwrap(), |group| {
        let backend = &backends[group.rank()];
        let x = backend.upload(&vec![bf16::ONE; 6 * 1024]).unwrap();
        let mut y = backend.upload(&vec![bf16::ONE; 3 * 1024]).unwrap();
        let args = Forward::new(x.as_view(), y.as_view_mut()).parts(2, 3 * 1024);
        let parts = group.forward_reduced(&case.spec, args);
        assert!(matches!(parts, Err(Error::Unsupported { .. })), "{parts:?}");
        let args = Forward::added_to_residual(x.slice(0..3 * 1024)).residual_in_place(y.as_view_mut());
        let after = group.forward_reduced(&case.spec.residual_after(), args);
        assert!(matches!(after, Err(Error::Unsupported { .. })), "{after:?}");
        let short = group.forward_reduced(&case.spec, Forward::new(x.slice(0..1024), y.as_view_mut()));
        assert!(matches!(short, Err(Error::Length { arg: "x", .. })), "{short:?}");
        let mut tensors = Tensors::new(backend, &case, &data, group.rank());
        tensors.prepare(&group).unwrap();
        tensors.call(&group).unwrap();
        backend.stream().synchronize().unwrap();
        group.check().unwrap();
        tensors.output(backend)
    });
    data.judge(&backends[0], &case, &outputs);
    let groups = PeerGroup::in_process(&backends, 1024).unwrap();
    let mut tensors = Tensors::new(&backends[0], &case, &data, 0);
    let small = tensors.call(&groups[0]);
    assert!(matches!(&small, Err(Error::Unsupported { rule }) if rule.contains("takes 2048 bytes")), "{small:?}");
}

/// A group in memory of the caller, which the group does not free.
#[test]
fn groups_of_given_memory_are_as_good() {
    fn group(backend: &CudaBackend, rank: usize, workspaces: &[u64], bytes: usize) -> PeerGroup {
        // SAFETY:
        // - memory: allocated below, with the length from `workspace_bytes`, and freed when all is
        //   done;
        // - order: the groups are made before the threads that make calls.
        unsafe { PeerGroup::from_pointers(backend, rank, workspaces, bytes) }.unwrap()
    }
    let Some(machine) = Machine::open() else { return };
    let case = Case::new(3, NormSpec::layer(40, 1001, 1e-5));
    let data = Data::<bf16, bf16, bf16>::new(&case);
    let backends = machine.on_one(3);
    let len = PeerGroup::workspace_bytes(3, case.bytes).unwrap();
    backends[0].stream().context().bind_to_thread().unwrap();
    // SAFETY:
    // - contents: the groups set them.
    let workspaces = [0; 3].map(|_| unsafe { result::malloc_sync(len) }.unwrap());
    let groups = (0..3).map(|rank| group(&backends[rank], rank, &workspaces, case.bytes)).collect();
    let outputs = on_each(groups, |group| {
        let backend = &backends[group.rank()];
        let mut tensors = Tensors::new(backend, &case, &data, group.rank());
        tensors.prepare(&group).unwrap();
        (0..5).for_each(|_| tensors.call(&group).unwrap());
        backend.stream().synchronize().unwrap();
        group.check().unwrap();
        tensors.output(backend)
    });
    data.judge(&backends[0], &case, &outputs);
    for workspace in workspaces {
        // SAFETY:
        // - address: allocated above; the groups that used it are gone, and waited for their
        //   streams.
        unsafe { result::free_sync(workspace) }.unwrap();
    }
}
