//! The check of a backend's spans: they must say truly where a view lies, because validation finds overlaps by them.
//!
//! An overlap itself cannot be tested through a [`Harness`], which gives out one written view of a buffer at a time.

use std::ops::Range;

use super::Harness;
use super::device::TransferError;
use crate::{Element, NormBackend, Span, bf16, f16};

/// Checks the views of two buffers of every dtype, and what is uploaded in parts. The inner error says what is wrong.
pub(super) fn check<H: Harness>(harness: &H) -> Result<Result<(), String>, TransferError> {
    let views = [check_dtype::<H, f32>, check_dtype::<H, f16>, check_dtype::<H, bf16>];
    let parts = [check_parts::<H, f32>, check_parts::<H, f16>, check_parts::<H, bf16>];
    let checked: Result<Vec<_>, _> = views.into_iter().chain(parts).map(|check| check(harness)).collect();
    Ok(checked?.into_iter().collect())
}

/// What is uploaded in parts must be where it was put, or calls on rows far apart would be judged by other data.
fn check_parts<H: Harness, E: Element>(harness: &H) -> Result<Result<(), String>, TransferError> {
    let values: Vec<E> = (0..LEN as u16).map(|i| E::from_f32(f32::from(i))).collect();
    let parts = [(1, &values[..4]), (9, &values[9..20]), (LEN - 3, &values[..3])];
    let buffer = harness.upload_parts(LEN, &parts).map_err(TransferError)?;
    let whole = harness.download(&buffer).map_err(TransferError)?;
    for (first, part) in parts {
        let range = first..first + part.len();
        let alone = harness.download_part(&buffer, range.clone()).map_err(TransferError)?;
        if alone != part || whole.get(range.clone()) != Some(part) {
            return Ok(Err(format!("elements {range:?} of {} are not those that were uploaded there", E::DTYPE)));
        }
    }
    Ok(Ok(()))
}

/// Elements of a buffer.
const LEN: usize = 64;

fn check_dtype<H: Harness, E: Element>(harness: &H) -> Result<Result<(), String>, TransferError> {
    let upload = || harness.upload(&[E::default(); LEN]).map_err(TransferError);
    let (mut buffer, other) = (upload()?, upload()?);
    let whole = read_span(harness, &buffer, 0..LEN);
    for (start, end) in [(0, LEN), (0, 1), (5, 13), (LEN - 1, LEN)] {
        let expected = Span { start: whole.start + (start * E::DTYPE.size()) as u64, len: end - start, ..whole };
        let read = read_span(harness, &buffer, start..end);
        let written = H::Backend::out_span::<E>(&harness.view_mut(&mut buffer, start..end));
        if let Some(span) = [read, written].into_iter().find(|span| *span != expected) {
            return Ok(Err(format!("elements {start}..{end} of {} lie at {expected:?}, not at {span:?}", E::DTYPE)));
        }
    }
    let (other, bytes) = (read_span(harness, &other, 0..LEN), (LEN * E::DTYPE.size()) as u64);
    if other.allocation == whole.allocation && other.start.abs_diff(whole.start) < bytes {
        return Ok(Err(format!("two buffers of {} share memory: {whole:?} and {other:?}", E::DTYPE)));
    }
    Ok(Ok(()))
}

fn read_span<H: Harness, E: Element>(harness: &H, buffer: &H::Buffer<E>, range: Range<usize>) -> Span {
    H::Backend::in_span::<E>(&harness.view(buffer, range))
}
