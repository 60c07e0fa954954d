//! The suite's named tests on the simulated backend without a bug: the macro works, and a correct
//! kernel passes.

use rmsnorm_conformance::simulate::SimulatedBackend;

rmsnorm_conformance::conformance!(Ok(SimulatedBackend::new(None)));
