//! Checks a backend's spans. A span must state the position of its view correctly, because
//! validation detects overlaps by spans.
//!
//! Overlaps cannot be tested through a [`Harness`], because it gives out only one writable view of
//! a buffer at a time.

use std::ops::Range;

use rmsnorm_spec::{AnyElement, F8E4M3, F8E5M2, NormBackend, Span, bf16, f16};

use crate::Harness;
use crate::run::harness::TransferError;

/// Checks the views of two buffers of every type, and uploads in parts. The inner error is the
/// finding.
pub(crate) async fn check<H: Harness>(harness: &H) -> Result<Result<(), String>, TransferError> {
    let views = [check_type::<H, f32>, check_type::<H, f16>, check_type::<H, bf16>];
    let bytes = [check_type::<H, F8E4M3>, check_type::<H, F8E5M2>, check_type::<H, i8>, check_type::<H, u8>];
    let views: Result<Vec<_>, _> = views.into_iter().chain(bytes).map(|check| check(harness)).collect();
    let parts = [
        check_parts::<H, f32>(harness).await?,
        check_parts::<H, f16>(harness).await?,
        check_parts::<H, bf16>(harness).await?,
        check_parts::<H, i8>(harness).await?,
    ];
    Ok(views?.into_iter().chain(parts).collect())
}

/// Parts must be uploaded to their place; otherwise calls with distant rows would be compared with
/// other data.
async fn check_parts<H: Harness, E: AnyElement + PartialEq>(harness: &H) -> Result<Result<(), String>, TransferError> {
    let values: Vec<E> = (0..LEN as u32).map(E::from_bits).collect();
    let parts = [(1, &values[..4]), (9, &values[9..20]), (LEN - 3, &values[..3])];
    let buffer = harness.upload_parts(LEN, &parts).map_err(TransferError::Upload)?;
    let whole = harness.fetch_part(&buffer, 0..LEN).await.map_err(TransferError::Download)?;
    for (first, part) in parts {
        let range = first..first + part.len();
        let alone = harness.fetch_part(&buffer, range.clone()).await.map_err(TransferError::Download)?;
        if alone != part || whole.get(range.clone()) != Some(part) {
            return Ok(Err(format!("elements {range:?} of {} differ from the uploaded ones", E::STORAGE)));
        }
    }
    Ok(Ok(()))
}

/// Length of a buffer in elements.
const LEN: usize = 64;

fn check_type<H: Harness, E: AnyElement>(harness: &H) -> Result<Result<(), String>, TransferError> {
    let upload = || harness.upload(&[E::from_bits(0); LEN]).map_err(TransferError::Upload);
    let (mut buffer, other) = (upload()?, upload()?);
    let whole = read_span(harness, &buffer, 0..LEN);
    for (start, end) in [(0, LEN), (0, 1), (5, 13), (LEN - 1, LEN)] {
        let expected = Span { start: whole.start + (start * E::STORAGE.size()) as u64, len: end - start, ..whole };
        let read = read_span(harness, &buffer, start..end);
        let written = H::Backend::out_span::<E>(&harness.view_mut(&mut buffer, start..end));
        if let Some(span) = [read, written].into_iter().find(|span| *span != expected) {
            return Ok(Err(format!("elements {start}..{end} of {} lie at {expected:?}, not at {span:?}", E::STORAGE)));
        }
    }
    let (other, bytes) = (read_span(harness, &other, 0..LEN), (LEN * E::STORAGE.size()) as u64);
    if other.allocation == whole.allocation && other.start.abs_diff(whole.start) < bytes {
        return Ok(Err(format!("two buffers of {} share memory: {whole:?} and {other:?}", E::STORAGE)));
    }
    Ok(Ok(()))
}

fn read_span<H: Harness, E: AnyElement>(harness: &H, buffer: &H::Buffer<E>, range: Range<usize>) -> Span {
    H::Backend::in_span::<E>(&harness.view(buffer, range))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Arithmetic;
    use rmsnorm_spec::{AnyCall, Error, Problem};

    /// Spans of read or writable views that are off by some bytes, and a part that is uploaded to a
    /// wrong place.
    #[derive(Clone, Copy, Default)]
    struct Skewed {
        read: u64,
        written: u64,
        part: usize,
    }

    #[derive(Clone, Copy)]
    struct View {
        span: Span,
    }

    impl NormBackend for Skewed {
        type In<'a, E: AnyElement> = View;
        type Out<'a, E: AnyElement> = View;

        fn name(&self) -> &'static str {
            "skewed"
        }
        fn in_span<E: AnyElement>(view: &View) -> Span {
            view.span
        }
        fn out_span<E: AnyElement>(view: &View) -> Span {
            view.span
        }
        fn workspace_len(&self, _: &Problem) -> usize {
            0
        }
        fn launch(&self, _: AnyCall<'_, '_, Self>) -> Result<(), Error> {
            Ok(())
        }
    }

    fn span<E: AnyElement>(buffer: &[E], range: &Range<usize>) -> Span {
        let start = buffer.as_ptr().addr() as u64 + (range.start * size_of::<E>()) as u64;
        Span { allocation: 0, start, len: range.len() }
    }

    impl Harness for Skewed {
        type Backend = Skewed;
        type Buffer<E: AnyElement> = Vec<E>;

        fn backend(&self) -> &Skewed {
            self
        }
        fn arithmetic(&self) -> Arithmetic {
            Arithmetic::IEEE
        }
        fn device(&self) -> String {
            String::new()
        }
        fn cols_breakpoints(&self) -> Vec<usize> {
            Vec::new()
        }
        fn rows_breakpoints(&self) -> Vec<usize> {
            Vec::new()
        }
        fn upload<E: AnyElement>(&self, data: &[E]) -> Result<Vec<E>, Error> {
            Ok(data.to_vec())
        }
        fn download<E: AnyElement>(&self, buffer: &Vec<E>) -> Result<Vec<E>, Error> {
            Ok(buffer.clone())
        }
        fn download_part<E: AnyElement>(&self, buffer: &Vec<E>, range: Range<usize>) -> Result<Vec<E>, Error> {
            Ok(buffer[range.start.saturating_sub(self.part)..range.end - self.part].to_vec())
        }
        fn view<E: AnyElement>(&self, buffer: &Vec<E>, range: Range<usize>) -> View {
            let span = span(buffer, &range);
            View { span: Span { start: span.start + self.read, ..span } }
        }
        fn view_mut<E: AnyElement>(&self, buffer: &mut Vec<E>, range: Range<usize>) -> View {
            let span = span(buffer, &range);
            View { span: Span { start: span.start + self.written, ..span } }
        }
    }

    #[test]
    fn spans_and_parts_that_are_not_where_they_say_are_found() {
        let verdict =
            |skewed: Skewed| pollster::block_on(check(&skewed)).expect("nothing is transferred that could fail");
        assert_eq!(verdict(Skewed::default()), Ok(()));
        // If all read spans are off by the same amount, they agree with each other, but not with
        // the writable ones.
        for skewed in [
            Skewed { read: 4, ..Skewed::default() },
            Skewed { written: 4, ..Skewed::default() },
            Skewed { part: 1, ..Skewed::default() },
        ] {
            assert!(verdict(skewed).is_err());
        }
    }
}
