//! Learning handles from a program's own RM calls.
