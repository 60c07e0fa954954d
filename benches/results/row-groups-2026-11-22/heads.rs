//! What timed the heads in run.txt: built as an example of rmsnorm-core with its feature `cuda`.

use rmsnorm_core::cuda::cudarc::driver::sys::CUevent_flags;
use rmsnorm_core::cuda::{Backward, CudaBackend, Forward};
use rmsnorm_core::{NormSpec, RowLayout, Rows, bf16};
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let backend = CudaBackend::new(0)?;
    let backend = backend.on(backend.stream().context().new_stream()?)?;
    let stream = backend.stream().clone();
    let (heads, d) = (32usize, 128usize);
    for tokens in [32768usize, 8192, 1024] {
        let token = 3 * heads * d;
        let rows = tokens * heads;
        let qkv = stream.clone_htod(
            &(0..tokens * token)
                .map(|i| bf16::from_f32((i % 7) as f32 - 3.0))
                .collect::<Vec<_>>(),
        )?;
        let dense = stream.clone_htod(
            &(0..rows * d)
                .map(|i| bf16::from_f32((i % 7) as f32 - 3.0))
                .collect::<Vec<_>>(),
        )?;
        let mut y = stream.alloc_zeros::<bf16>(rows * d)?;
        let mut dqkv = stream.alloc_zeros::<bf16>(tokens * token)?;
        let mut rstd = stream.alloc_zeros::<f32>(rows)?;
        let w = stream.clone_htod(&vec![bf16::ONE; d])?;
        let mut dw = stream.alloc_zeros::<bf16>(d)?;
        let norm = NormSpec::rms(rows, d, 1e-6);
        let layout = RowLayout::fold(&[tokens, heads, d], &[token as isize, d as isize, 1]).unwrap();
        let span = layout.span();
        for what in [
            "whole tokens",
            "one of 3 heads",
            "dense",
            "grouped",
            "grouped y",
            "bwd dense",
            "bwd grouped",
        ] {
            let mut call = || -> Result<(), Box<dyn std::error::Error>> {
                match what {
                    "whole tokens" => backend.forward(
                        &NormSpec::rms(tokens, heads * d, 1e-6),
                        Forward::<_, bf16>::new(Rows::strided(qkv.slice(0..span), token), y.as_view_mut())
                            .rstd(rstd.slice_mut(0..tokens)),
                    )?,
                    "one of 3 heads" => backend.forward(
                        &norm,
                        Forward::new(
                            Rows::strided(qkv.slice(0..(rows - 1) * 3 * d + d), 3 * d),
                            y.as_view_mut(),
                        )
                        .weight(w.as_view())
                        .rstd(rstd.as_view_mut()),
                    )?,
                    "dense" => backend.forward(
                        &norm,
                        Forward::new(dense.as_view(), y.as_view_mut())
                            .weight(w.as_view())
                            .rstd(rstd.as_view_mut()),
                    )?,
                    "grouped" => backend.forward(
                        &norm,
                        Forward::new(layout.rows(qkv.slice(0..span)), y.as_view_mut())
                            .weight(w.as_view())
                            .rstd(rstd.as_view_mut()),
                    )?,
                    "grouped y" => backend.forward(
                        &norm,
                        Forward::new(layout.rows(qkv.slice(0..span)), layout.rows(dqkv.slice_mut(0..span)))
                            .weight(w.as_view())
                            .rstd(rstd.as_view_mut()),
                    )?,
                    "bwd dense" => backend.backward(
                        &norm,
                        Backward::new(dense.as_view(), dense.as_view(), rstd.as_view(), y.as_view_mut())
                            .weight(w.as_view())
                            .dweight(dw.as_view_mut()),
                    )?,
                    _ => backend.backward(
                        &norm,
                        Backward::new(
                            dense.as_view(),
                            layout.rows(qkv.slice(0..span)),
                            rstd.as_view(),
                            layout.rows(dqkv.slice_mut(0..span)),
                        )
                        .weight(w.as_view())
                        .dweight(dw.as_view_mut()),
                    )?,
                }
                Ok(())
            };
            for _ in 0..20 {
                call()?;
            }
            stream.synchronize()?;
            let mut times = vec![];
            for _ in 0..15 {
                let a = stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT))?;
                for _ in 0..20 {
                    call()?;
                }
                let b = stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT))?;
                times.push(a.elapsed_ms(&b)? * 1000.0 / 20.0);
            }
            times.sort_by(f32::total_cmp);
            let us = times[7];
            let mats = if what.starts_with("bwd") { 3.0 } else { 2.0 };
            println!(
                "{tokens} tokens x {heads} heads of {d} bf16, {what}: {us:.2} us, {:.0} GB/s",
                mats * (rows * d * 2) as f32 / us / 1e3
            );
        }
    }
    let _ = Rows::dense(());
    Ok(())
}
