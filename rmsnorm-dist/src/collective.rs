//! [`Collective`]: communication between the ranks of a group.

use rmsnorm_spec::{AnyElement, Element, Error, NormBackend};

use crate::RowShares;

/// Communication between the ranks of a group. Implement it to use your own communication library.
///
/// Every rank makes the same calls in the same order. Calls are enqueued on the backend's stream;
/// in host memory they are complete on return.
pub trait Collective<B: NormBackend> {
    /// This rank, from 0.
    fn rank(&self) -> usize;

    /// Number of ranks, at least 1.
    fn ranks(&self) -> usize;

    /// Sends share `r` of `from` to rank `r`, and receives this rank's share from every rank: part
    /// `r` of `to` comes from rank `r`. `from` has all `shares`; `to` has [`ranks`](Self::ranks)
    /// parts, each as long as this rank's share.
    ///
    /// # Errors
    /// `Length` if a view has the wrong length, before anything is sent. `Device` if the
    /// implementation detects a rank that is missing or made another call; some implementations
    /// wait forever instead.
    fn all_to_all<T: AnyElement>(&self, shares: &RowShares, from: B::In<'_, T>, to: B::Out<'_, T>)
    -> Result<(), Error>;

    /// Sends this rank's share, `from`, to all ranks. `to` receives all `shares`.
    ///
    /// # Errors
    /// As [`all_to_all`](Self::all_to_all).
    fn all_gather<T: AnyElement>(&self, shares: &RowShares, from: B::In<'_, T>, to: B::Out<'_, T>)
    -> Result<(), Error>;

    /// [`all_gather`](Self::all_gather) in place: `tensor` has room for all `shares`, and this
    /// rank's share is already in its place.
    ///
    /// # Errors
    /// As [`all_to_all`](Self::all_to_all).
    fn all_gather_in_place<T: AnyElement>(&self, shares: &RowShares, tensor: B::Out<'_, T>) -> Result<(), Error>;

    /// `to` = sum of every rank's `from`, with the same bits on every rank. The implementation
    /// chooses the order and the precision. Used by [`Order::Engine`](crate::Order::Engine).
    ///
    /// # Errors
    /// As [`all_to_all`](Self::all_to_all), for a `to` that is not as long as `from`. `Unsupported`
    /// from an implementation that does not override this method.
    fn all_reduce<T: Element>(&self, from: B::In<'_, T>, to: B::Out<'_, T>) -> Result<(), Error> {
        let _ = (from, to);
        adds_nothing()
    }

    /// [`all_reduce`](Self::all_reduce) in place: the sum overwrites `tensor`.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    fn all_reduce_in_place<T: Element>(&self, tensor: B::Out<'_, T>) -> Result<(), Error> {
        let _ = tensor;
        adds_nothing()
    }
}

fn adds_nothing() -> Result<(), Error> {
    let rule = "this collective has no all-reduce: implement Collective::all_reduce, or use Order::ByRank";
    Err(Error::Unsupported { rule: rule.into() })
}

/// Checks that a view has `len` elements. For implementations of [`Collective`].
///
/// # Errors
/// `Length` with the argument's name.
pub fn check_len(arg: &'static str, len: usize, got: usize) -> Result<(), Error> {
    if got == len { Ok(()) } else { Err(Error::Length { arg, min: len, max: len, got }) }
}
