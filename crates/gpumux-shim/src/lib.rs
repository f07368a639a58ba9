//! libgpumux.so: preloaded into tenants, learns their channel groups and tells the daemon
