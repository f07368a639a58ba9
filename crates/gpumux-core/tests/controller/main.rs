//! The controller and the memory broker together, in virtual time: what must hold whatever tenants, controls and processes do.

mod mutations;
mod properties;
mod sequences;
mod world;
