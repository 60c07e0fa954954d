//! The suite's own named tests, on the simulated backend without a bug: the macro works, and a correct kernel passes.
#![cfg(feature = "conformance")]

use rmsnorm_spec::conformance::simulate::SimulatedBackend;

rmsnorm_spec::conformance!(Ok(SimulatedBackend::new(None)));
