//! The memory broker in virtual time: what went wrong before, what may go wrong, and what must hold in any case.

mod crossing;
mod detained;
mod elastic;
mod ends;
mod faults;
mod host;
mod kept;
mod model;
mod mutations;
mod parts;
mod programs;
mod properties;
mod requests;
mod restarts;
mod sessions;
mod shown;
mod turns;
mod world;
