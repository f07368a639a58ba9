//! `gpumux`: the command line.

fn main() {}
