//! The last seconds as a Chrome trace, which Perfetto and `chrome://tracing` open: one process per device,
//! one thread per domain.

use std::collections::BTreeMap;

use gpumux_core::{Demand, TenantId};
use serde_json::{Value, json};

use crate::scheduler::{Event, History, Now, What, Who};

/// What happened, as JSON. `name` knows what tenants are called.
pub(crate) fn chrome(history: &[History], name: impl Fn(TenantId) -> String) -> String {
    let mut events = Vec::new();
    for (pid, device) in history.iter().enumerate() {
        events.push(json!({
            "ph": "M", "pid": pid, "name": "process_name", "args": {"name": device.device},
        }));
        for line in lines(device).values() {
            let Who {
                id,
                tenant,
                pid: process,
            } = line.who;
            let thread = format!("{} (process {process})", name(*tenant));
            events.push(json!({
                "ph": "M", "pid": pid, "tid": id.0, "name": "thread_name", "args": {"name": thread},
            }));
            line.draw(device, pid, &mut events);
        }
    }
    json!({"displayTimeUnit": "ms", "traceEvents": events}).to_string()
}

/// One domain's events.
struct Line<'a> {
    who: &'a Who,
    events: Vec<&'a Event>,
    present: Option<Now>,
}

fn lines(device: &History) -> BTreeMap<u64, Line<'_>> {
    let mut lines = BTreeMap::new();
    let line = |who| Line {
        who,
        events: Vec::new(),
        present: None,
    };
    for (who, now) in &device.present {
        lines.entry(who.id.0).or_insert_with(|| line(who)).present = Some(*now);
    }
    for event in &device.events {
        let who = &*event.who;
        lines
            .entry(who.id.0)
            .or_insert_with(|| line(who))
            .events
            .push(event);
    }
    lines
}

impl Line<'_> {
    /// What it had before its first event: what did not change is as it is now.
    fn before(&self) -> Now {
        let first = |pick: &dyn Fn(What) -> Option<Now>| {
            self.events.iter().find_map(|event| pick(event.what))
        };
        let mut now = self.present.unwrap_or(UNKNOWN);
        if let Some(then) = first(&|what| match what {
            What::Frozen => Some(Now {
                frozen: false,
                ..UNKNOWN
            }),
            What::Thawed => Some(Now {
                frozen: true,
                ..UNKNOWN
            }),
            _ => None,
        }) {
            now.frozen = then.frozen;
        }
        if let Some(then) = first(&|what| match what {
            What::Demand(Demand::Idle) => Some(Now {
                demand: Demand::Busy,
                ..UNKNOWN
            }),
            What::Demand(_) => Some(Now {
                demand: Demand::Idle,
                ..UNKNOWN
            }),
            _ => None,
        }) {
            now.demand = then.demand;
        }
        if first(&|what| matches!(what, What::Slice(_) | What::Tampered(_)).then_some(UNKNOWN))
            .is_some()
        {
            now.timeslice_us = UNKNOWN.timeslice_us;
        }
        if first(&|what| matches!(what, What::Reason(_)).then_some(UNKNOWN)).is_some() {
            now.reason = UNKNOWN.reason;
        }
        now
    }

    /// Spans of what it had, and marks where something happened.
    fn draw(&self, device: &History, pid: usize, events: &mut Vec<Value>) {
        let tid = self.who.id.0;
        let span = |now: Option<Now>, from: u64, to: u64, events: &mut Vec<Value>| {
            if let Some(now) = now
                && let Some(name) = state(now)
                && to > from
            {
                events.push(json!({
                    "ph": "X", "cat": "state", "name": name, "pid": pid, "tid": tid,
                    "ts": from, "dur": to - from,
                    "args": {"reason": now.reason, "timeslice_us": now.timeslice_us},
                }));
            }
        };
        let came = matches!(
            self.events.first().map(|event| event.what),
            Some(What::Came(_))
        );
        let mut now = (!came).then(|| self.before());
        let mut since = device.from.0;
        for event in &self.events {
            let then = after(now, event.what);
            if let Some((name, bytes, took_us)) = moved(event.what) {
                // On a line of its own: it overlaps with the states.
                let from = event.at.0.saturating_sub(took_us);
                for (phase, ts) in [("b", from), ("e", event.at.0)] {
                    events.push(json!({
                        "ph": phase, "cat": "memory", "id": format!("{tid} {}", event.at.0), "name": name, "pid": pid, "tid": tid,
                        "ts": ts, "args": {"bytes": bytes},
                    }));
                }
            }
            if let Some(mark) = mark(event.what) {
                events.push(json!({
                    "ph": "i", "s": "t", "cat": "event", "name": mark, "pid": pid, "tid": tid,
                    "ts": event.at.0,
                }));
            }
            if then != now {
                span(now, since, event.at.0, events);
                (now, since) = (then, event.at.0);
            }
        }
        span(now, since, device.to.0, events);
    }
}

const UNKNOWN: Now = Now {
    frozen: false,
    timeslice_us: 0,
    demand: Demand::Unknown,
    reason: "not recorded",
};

/// What it has after an event; none: it is not there.
fn after(now: Option<Now>, what: What) -> Option<Now> {
    if let What::Came(now) = what {
        return Some(now);
    }
    let now = now?;
    Some(match what {
        What::Left => return None,
        What::Frozen => Now {
            frozen: true,
            ..now
        },
        What::Thawed | What::Fault => Now {
            frozen: false,
            ..now
        },
        What::Slice(timeslice_us) | What::Tampered(timeslice_us) => Now {
            timeslice_us,
            ..now
        },
        What::Demand(demand) => Now { demand, ..now },
        What::Reason(reason) => Now { reason, ..now },
        What::Came(now) => now,
        What::Ran | What::Held(_) | What::WentAway { .. } | What::CameBack { .. } => now,
    })
}

/// The name of a span; nothing is drawn of a domain that has no work and may run.
fn state(now: Now) -> Option<&'static str> {
    match (now.frozen, now.demand.may_run()) {
        (false, true) => Some("may run"),
        (true, true) => Some("frozen, has work"),
        (true, false) => Some("frozen, no work"),
        (false, false) => None,
    }
}

/// What is marked: the rest is seen in the spans.
fn mark(what: What) -> Option<String> {
    match what {
        What::Came(_) => Some("came".into()),
        What::Left => Some("left".into()),
        What::Slice(us) => Some(format!("slice {us} µs")),
        What::Tampered(us) => Some(format!("its timeslice was changed to {us} µs")),
        What::Ran => Some("it ran while it was frozen".into()),
        What::Fault => Some("a control failed".into()),
        What::Held(1) => Some("hint".into()),
        What::Held(times) => Some(format!("{times} hints")),
        What::Frozen | What::Thawed | What::Demand(_) | What::Reason(_) => None,
        What::WentAway { .. } | What::CameBack { .. } => None,
    }
}

/// What is drawn of a move of memory: its name, bytes and µs.
fn moved(what: What) -> Option<(&'static str, u64, u64)> {
    match what {
        What::WentAway { bytes, took_us } => Some(("memory goes to the host", bytes, took_us)),
        What::CameBack { bytes, took_us } => Some(("memory comes back", bytes, took_us)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use gpumux_core::{DomainId, Micros};

    use super::*;

    fn history() -> History {
        let who = |id| {
            Arc::new(Who {
                id: DomainId(id),
                tenant: TenantId(id),
                pid: 100 + id as u32,
            })
        };
        let (old, new) = (who(1), who(2));
        let event = |at, who: &Arc<Who>, what| Event {
            at: Micros(at),
            who: Arc::clone(who),
            what,
        };
        let now = Now {
            frozen: false,
            timeslice_us: 2048,
            demand: Demand::Busy,
            reason: "new",
        };
        History {
            device: "GPU-0".into(),
            from: Micros(1000),
            to: Micros(2000),
            events: vec![
                event(1100, &old, What::Thawed),
                event(1200, &new, What::Came(now)),
                event(1300, &new, What::Slice(1)),
                event(1300, &new, What::Reason("waits for its quantum")),
                event(1400, &new, What::Frozen),
                event(1450, &old, What::Held(1)),
                event(1500, &old, What::Demand(Demand::Idle)),
                event(
                    1550,
                    &old,
                    What::WentAway {
                        bytes: 4096,
                        took_us: 200,
                    },
                ),
                event(1600, &new, What::Left),
            ],
            present: vec![(
                old,
                Now {
                    demand: Demand::Idle,
                    reason: "has no work",
                    ..now
                },
            )],
        }
    }

    #[test]
    fn spans_follow_the_events() {
        let trace: Value =
            serde_json::from_str(&chrome(&[history()], |id| format!("t{}", id.0))).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        let spans: Vec<_> = events
            .iter()
            .filter(|event| event["ph"] == "X")
            .map(|e| {
                (
                    e["tid"].as_u64().unwrap(),
                    e["name"].as_str().unwrap(),
                    e["ts"].as_u64().unwrap(),
                    e["dur"].as_u64().unwrap(),
                )
            })
            .collect();
        assert_eq!(
            spans,
            [
                (1, "frozen, has work", 1000, 100),
                (1, "may run", 1100, 400),
                (2, "may run", 1200, 100),
                (2, "may run", 1300, 100),
                (2, "frozen, has work", 1400, 200),
            ]
        );
        let reasons = events
            .iter()
            .filter(|e| e["args"]["reason"] == "waits for its quantum");
        assert_eq!(reasons.count(), 2);
        assert!(
            events
                .iter()
                .any(|e| e["args"]["name"] == "t2 (process 102)")
        );
        assert!(
            events
                .iter()
                .any(|e| e["name"] == "slice 1 µs" && e["ph"] == "i")
        );
        assert!(
            (events.iter()).any(|e| e["name"] == "hint" && e["ts"] == 1450 && e["tid"] == 1),
            "{events:?}"
        );
        let moves: Vec<_> = events.iter().filter(|e| e["cat"] == "memory").collect();
        let ends = moves.iter().map(|e| (e["ph"].as_str(), e["ts"].as_u64()));
        assert_eq!(
            ends.collect::<Vec<_>>(),
            [(Some("b"), Some(1350)), (Some("e"), Some(1550))]
        );
        assert!(
            moves
                .iter()
                .all(|e| e["id"] == moves[0]["id"] && e["args"]["bytes"] == 4096)
        );
    }

    #[test]
    fn nothing_that_happened_is_as_it_is_now() {
        let quiet = History {
            events: Vec::new(),
            ..history()
        };
        let trace: Value = serde_json::from_str(&chrome(&[quiet], |_| "t".into())).unwrap();
        let spans = trace["traceEvents"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|e| e["ph"] == "X");
        assert_eq!(spans.count(), 0, "the only one has no work");
    }
}
