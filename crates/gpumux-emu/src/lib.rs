//! The emulated device: its server, its profile, and the calls by which programs reach it
