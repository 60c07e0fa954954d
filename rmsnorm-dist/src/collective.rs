//! [`Collective`]: what ranks can do with each other.

use rmsnorm_spec::{Element, Error, NormBackend, Stored};

use crate::Shares;

/// What a group of ranks can do with each other: the place where users bring their own engine.
///
/// Every rank makes the same calls in the same order. Calls enqueue on the backend's stream; those in host memory are done on return.
pub trait Collective<B: NormBackend> {
    /// This rank, from 0.
    fn rank(&self) -> usize;

    /// How many there are, at least 1.
    fn ranks(&self) -> usize;

    /// Share `r` of `from` goes to rank `r`; part `r` of `to` came from it. `from` has all of the `shares`, `to` has
    /// [`ranks`](Self::ranks) parts, each as long as this rank's share.
    ///
    /// # Errors
    /// `Length` if a view has another length, before anything is sent; `Device` if the engine finds out that a
    /// rank did not come or made another call; some wait for ever.
    fn all_to_all<T: Stored>(&self, shares: &Shares, from: B::In<'_, T>, to: B::Out<'_, T>) -> Result<(), Error>;

    /// Every rank's share goes to all: `from` is this rank's, `to` has all of the `shares`.
    ///
    /// # Errors
    /// As [`all_to_all`](Self::all_to_all).
    fn all_gather<T: Stored>(&self, shares: &Shares, from: B::In<'_, T>, to: B::Out<'_, T>) -> Result<(), Error>;

    /// The same where this rank's share is in its place already: `tensor` has all of the `shares`.
    ///
    /// # Errors
    /// As [`all_to_all`](Self::all_to_all).
    fn all_gather_in_place<T: Stored>(&self, shares: &Shares, tensor: B::Out<'_, T>) -> Result<(), Error>;

    /// `to = from` of all ranks, added in whatever order and precision the engine has: for [`Order::Any`](crate::Order::Any). Every rank
    /// has the same bits.
    ///
    /// # Errors
    /// As [`all_to_all`](Self::all_to_all), where `to` is not as long as `from`; `Unsupported` from an engine that does not override this.
    fn all_reduce<T: Element>(&self, from: B::In<'_, T>, to: B::Out<'_, T>) -> Result<(), Error> {
        let _ = (from, to);
        adds_nothing()
    }

    /// The same over this rank's: `tensor` is that, and then the sum.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    fn all_reduce_in_place<T: Element>(&self, tensor: B::Out<'_, T>) -> Result<(), Error> {
        let _ = tensor;
        adds_nothing()
    }
}

fn adds_nothing() -> Result<(), Error> {
    Err(Error::Unsupported { rule: "this collective moves elements, and adds none".into() })
}

/// That a view has as many elements as a call asks for: for who implements [`Collective`].
///
/// # Errors
/// `Length` with the argument's name.
pub fn check_len(arg: &'static str, len: usize, got: usize) -> Result<(), Error> {
    if got == len { Ok(()) } else { Err(Error::Length { arg, min: len, max: len, got }) }
}
