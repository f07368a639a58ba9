//! A run as a Chrome trace (`chrome://tracing`, Perfetto): requests per tenant, controls per device.

use serde_json::{Value, json};

use crate::gpu::Nanos;

/// The events so far.
#[derive(Default)]
pub(crate) struct Trace {
    events: Vec<Value>,
}

/// Rows of the trace: one process for requests, one for controls.
const REQUESTS: u32 = 1;
const CONTROLS: u32 = 2;

impl Trace {
    pub(crate) fn tenant(&mut self, tenant: usize, name: &str) {
        self.events.push(json!({
            "ph": "M", "pid": REQUESTS, "tid": tenant, "name": "thread_name", "args": {"name": name},
        }));
    }

    /// A request of a tenant, from arrival to completion.
    pub(crate) fn request(&mut self, tenant: usize, number: u64, from: Nanos, to: Nanos) {
        // Requests overlap when they queue: async events may.
        for (phase, at) in [("b", from), ("e", to)] {
            self.events.push(json!({
                "ph": phase, "cat": "request", "name": "request", "id": number,
                "pid": REQUESTS, "tid": tenant, "ts": micros(at),
            }));
        }
    }

    /// The share that a tenant received lately.
    pub(crate) fn share(&mut self, name: &str, at: Nanos, share: f64) {
        self.events.push(json!({
            "ph": "C", "pid": REQUESTS, "name": format!("share of {name}"),
            "ts": micros(at), "args": {"share": share},
        }));
    }

    pub(crate) fn control(&mut self, device: usize, what: &str, from: Nanos, to: Nanos) {
        self.events.push(json!({
            "ph": "X", "cat": "control", "name": what,
            "pid": CONTROLS, "tid": device, "ts": micros(from), "dur": micros(to - from),
        }));
    }

    /// The whole trace as JSON.
    pub(crate) fn finish(mut self) -> String {
        for (pid, name) in [(REQUESTS, "tenants"), (CONTROLS, "controls per device")] {
            self.events.push(json!({
                "ph": "M", "pid": pid, "name": "process_name", "args": {"name": name},
            }));
        }
        json!({"displayTimeUnit": "ms", "traceEvents": self.events}).to_string()
    }
}

fn micros(ns: Nanos) -> f64 {
    ns as f64 / 1000.0
}
