//! Errors on a working device are typed, and the next call works.

use rmsnorm_conformance::Harness;
use rmsnorm_wgpu::spec::{AnyCall, Checked, Error, GradReduction, NormBackend, NormSpec, bf16};
use rmsnorm_wgpu::{Backward, Forward, WgpuBackend, WgpuFailure, WgpuSlice, wgpu};
use wgpu::{BufferUsages, DeviceType, Features};

use crate::support::{Small, bits, buffer, open, open_another, open_limited, upload, whole};

/// The argument and the rule of an `InvalidArgument`.
fn invalid(answer: Result<(), Error>) -> (&'static str, String) {
    match answer {
        Err(Error::InvalidArgument { arg, rule }) => (arg, rule),
        other => panic!("{other:?}"),
    }
}

/// The rule of an `Unsupported`.
fn rule(answer: Result<(), Error>) -> String {
    match answer {
        Err(Error::Unsupported { rule }) => rule,
        other => panic!("{other:?}"),
    }
}

fn failure(answer: Result<(), Error>) -> WgpuFailure {
    match answer {
        Err(Error::Device { source, .. }) => source.downcast_ref::<WgpuFailure>().unwrap().clone(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_adapter_that_does_not_exist_is_unavailable() {
    let Some(_) = open() else { return };
    for ordinal in [WgpuBackend::device_count().unwrap(), usize::MAX] {
        let error = WgpuBackend::new(ordinal).unwrap_err();
        assert!(
            matches!(&error, Error::Unavailable { reason, .. } if reason.contains("there is no adapter")),
            "{error}"
        );
    }
}

#[test]
fn a_view_that_cannot_be_bound_is_refused_by_name() {
    let Some(gpu) = open() else { return };
    let small = Small::new(&gpu);
    let storage = BufferUsages::STORAGE | BufferUsages::COPY_DST;
    let (room, odd) = (buffer(&gpu, 256, storage), buffer(&gpu, 130, storage));
    let elsewhere = buffer(&gpu, 256, BufferUsages::COPY_DST);
    let view = |buffer, offset| WgpuSlice::<bf16>::new(buffer, offset, 64);
    for (bad, text) in [
        (view(&room, 1), "got bf16 at byte 1"),
        (view(&room, 130), "got 64 bf16 from byte 130 of 256"),
        (view(&room, u64::MAX - 1), "from byte 18446744073709551614 of 256"),
        (view(&elsewhere, 0), "got BufferUsages(COPY_DST)"),
        (view(&odd, 2), "a multiple of 4, got a tensor at the end of 130"),
    ] {
        for (name, args) in [("x", Forward::new(bad, whole(&small.y))), ("y", Forward::new(whole(&small.x), bad))] {
            let (arg, rule) = invalid(gpu.forward(&small.norm, args));
            assert!(arg == name && rule.contains(text), "{arg}: {rule}");
        }
        small.check(&gpu);
    }
}

#[test]
fn an_output_over_an_input_is_refused() {
    let Some(gpu) = open() else { return };
    let (small, room) = (Small::new(&gpu), upload::<bf16>(&gpu, 1, 128));
    let x = whole(&room).slice(0..64);
    let answer = gpu.forward(&small.norm, Forward::new(x, whole(&room).slice(63..127)));
    assert!(matches!(answer, Err(Error::Overlap { output: "y", other: "x" })), "{answer:?}");
    gpu.forward(&small.norm, Forward::new(x, whole(&room).slice(64..128))).unwrap();
}

#[test]
fn a_buffer_of_another_device_is_a_validation_error() {
    let (Some(gpu), Some(other)) = (open(), open_another()) else { return };
    let (small, foreign) = (Small::new(&gpu), Small::new(&other));
    for args in [Forward::new(whole(&foreign.x), whole(&small.y)), Forward::new(whole(&small.x), whole(&foreign.y))] {
        let failure = failure(gpu.forward(&small.norm, args));
        assert!(failure.is_validation(), "{failure}");
        small.check(&gpu);
    }
}

#[test]
fn a_buffer_that_is_destroyed_or_mapped_is_a_validation_error() {
    let Some(gpu) = open() else { return };
    let small = Small::new(&gpu);
    let destroyed = buffer(&gpu, 128, BufferUsages::STORAGE);
    destroyed.destroy();
    let mapped = gpu.device().create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size: 128,
        usage: BufferUsages::STORAGE,
        mapped_at_creation: true,
    });
    for bad in [&destroyed, &mapped] {
        let failure = failure(gpu.forward(&small.norm, Forward::new(WgpuSlice::whole(bad), whole(&small.y))));
        assert!(failure.is_validation() && !failure.is_device_lost(), "{failure}");
        small.check(&gpu);
    }
}

/// A `Checked` call does not record the backend that checked it, and kernels index without bounds
/// checks.
#[test]
fn a_workspace_that_is_long_enough_for_another_backend_only_is_refused() {
    let Some(gpu) = open() else { return };
    // Few partial rows fit the bindings of this device.
    let Some(other) = open_limited(|limits| limits.max_storage_buffer_binding_size = 16 << 10) else { return };
    let norm = NormSpec::rms(64, 1024, 1e-6);
    let [dy, x, dx] = [1, 2, 3].map(|seed| upload::<bf16>(&gpu, seed, norm.rows * norm.cols));
    let (rstd, dweight) = (upload::<f32>(&gpu, 4, norm.rows), upload::<bf16>(&gpu, 5, norm.cols));
    let args = || Backward::new(whole(&dy), whole(&x), whole(&rstd), whole(&dx)).dweight(whole::<bf16>(&dweight));
    let problem = *Checked::backward(&gpu, norm, args()).unwrap().problem();
    let (len, needed) = (other.workspace_len(&problem), gpu.workspace_len(&problem));
    assert!(len < needed, "{len} and {needed} prove nothing");
    let workspace = upload::<f32>(&gpu, 6, len);
    let before = (bits(&gpu, &dx), bits(&gpu, &dweight));
    let call = Checked::backward(&other, norm, args().workspace(whole(&workspace)).erase()).unwrap();
    let answer = gpu.launch(AnyCall::Backward(call));
    assert!(matches!(answer, Err(Error::Length { arg: "workspace", .. })), "{answer:?}");
    assert_eq!((bits(&gpu, &dx), bits(&gpu, &dweight)), before);
}

#[test]
fn locks_are_unsupported() {
    let Some(gpu) = open() else { return };
    let (small, rstd) = (Small::new(&gpu), upload::<f32>(&gpu, 1, 4));
    let args = Backward::new(whole(&small.x), whole(&small.x), whole(&rstd), whole(&small.y));
    let rule = rule(gpu.backward(&small.norm, args.grad_reduction(GradReduction::Locks { groups: 4 })));
    assert!(rule.contains("Locks { groups: 4 }"), "{rule}");
}

#[test]
fn a_workspace_that_cannot_be_zeroed_is_refused_for_atomics() {
    let Some(gpu) = open() else { return };
    let (small, rstd) = (Small::new(&gpu), upload::<f32>(&gpu, 1, 4));
    let workspace = buffer(&gpu, 4096, BufferUsages::STORAGE);
    let dweight = upload::<bf16>(&gpu, 1, 16);
    for (reduction, is_refused) in [(GradReduction::Atomics, true), (GradReduction::Partials, false)] {
        let args = Backward::new(whole(&small.x), whole(&small.x), whole(&rstd), whole(&small.y));
        let args = args.dweight(whole(&dweight)).workspace(WgpuSlice::whole(&workspace)).grad_reduction(reduction);
        let answer = gpu.backward(&small.norm, args);
        if is_refused {
            let (arg, rule) = invalid(answer);
            assert!(arg == "workspace" && rule.contains("COPY_DST"), "{arg}: {rule}");
        } else {
            answer.unwrap();
        }
    }
}

#[test]
fn too_few_storage_buffers_are_refused_with_their_number() {
    let Some(gpu) = open_limited(|limits| limits.max_storage_buffers_per_shader_stage = 4) else { return };
    let (small, weight) = (Small::new(&gpu), upload::<bf16>(&gpu, 1, 16));
    let (mean, rstd) = (upload::<f32>(&gpu, 1, 4), upload::<f32>(&gpu, 1, 4));
    let args = || Forward::new(whole(&small.x), whole(&small.y)).weight(whole(&weight)).rstd(whole(&rstd));
    gpu.forward(&small.norm, args()).unwrap();
    let layer = NormSpec::layer(4, 16, 1e-6);
    gpu.forward(&layer, args().mean(whole(&mean))).unwrap();
    // Four matrices, and a binding for weight and rstd.
    let [residual, sum] = [8, 9].map(|seed| upload::<bf16>(&gpu, seed, 64));
    let rule = rule(gpu.forward(&layer, args().residual(whole(&residual)).residual_out(whole(&sum))));
    assert!(rule.contains("at most 4 storage buffers") && rule.contains('5'), "{rule}");
}

#[test]
fn a_destroyed_device_is_lost() {
    for limited in [false, true] {
        let Some(gpu) = (if limited { open_limited(|_| ()) } else { open_another() }) else { return };
        let small = Small::new(&gpu);
        small.check(&gpu);
        gpu.device().destroy();
        for _ in 0..3 {
            let forward = gpu.forward(&small.norm, Forward::new(whole(&small.x), whole(&small.y)));
            let failure = failure(forward);
            assert!(failure.is_device_lost(), "{failure}");
            assert!(failure.to_string().contains("a new device is needed"), "{failure}");
        }
        let mut encoder = gpu.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        let args = Forward::new(whole(&small.x), whole(&small.y));
        assert!(failure(gpu.encode_forward(&mut encoder, &small.norm, args)).is_device_lost());
        assert!(
            failure(gpu.batch(|kept| kept.forward(&small.norm, Forward::new(whole(&small.x), whole(&small.y)))))
                .is_device_lost()
        );
        assert!(gpu.download(&small.x).is_err() && gpu.upload(&[1f32]).is_err());
    }
}

/// On a device that the backend opened, where wgpu would otherwise panic.
#[test]
fn an_error_that_nobody_caught_is_the_next_calls_once() {
    let Some(gpu) = open_another() else { return };
    let small = Small::new(&gpu);
    let _without_usage = buffer(&gpu, 64, BufferUsages::empty());
    let failure = failure(gpu.forward(&small.norm, Forward::new(whole(&small.x), whole(&small.y))));
    assert!(failure.to_string().contains("outside of a call") && !failure.is_device_lost(), "{failure}");
    small.check(&gpu);
}

#[test]
fn a_backend_says_what_it_is() {
    let (Some(gpu), Some(limited)) = (open(), open_limited(|_| ())) else { return };
    let info = gpu.device().adapter_info();
    assert_eq!([NormBackend::name(&gpu), NormBackend::name(&limited)], ["wgpu"; 2]);
    assert_eq!((gpu.ordinal(), limited.ordinal()), (Some(0), None));
    assert_eq!(gpu.is_software(), info.device_type == DeviceType::Cpu);
    let (least, most) = (info.subgroup_min_size, info.subgroup_max_size);
    let subgroups = match gpu.device().features().contains(Features::SUBGROUP) {
        false => "no subgroups,".to_owned(),
        true if least == most => format!(" subgroups of {least},"),
        true => format!(" subgroups of {least} to {most},"),
    };
    let text = gpu.to_string();
    assert!(text.starts_with(&info.name) && text.contains(&subgroups), "{text}");
    assert!(limited.to_string().contains("no subgroups,"), "{limited}");
    assert!(format!("{gpu:?}").contains(&text), "{gpu:?}");
}

#[test]
fn nothing_is_recorded_for_no_rows() {
    let Some(gpu) = open() else { return };
    let empty = upload::<bf16>(&gpu, 1, 0);
    let view = || WgpuSlice::<bf16>::new(empty.buffer(), 0, 0);
    gpu.forward(&NormSpec::rms(0, 16, 1e-6), Forward::new(view(), WgpuSlice::new(empty.buffer(), 0, 0))).unwrap();
}
