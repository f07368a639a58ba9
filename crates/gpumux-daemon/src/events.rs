//! What happened lately: the last events, and a way to wait for the next.

use std::sync::{Mutex, PoisonError};

use gpumux_core::{MAX_NAME, Ring};
use tokio::sync::watch;

use crate::{
    api::types::{Event, EventKind},
    clock::since_1970,
    quota::cut,
};

/// Events that are kept.
const MAX_EVENTS: usize = 1024;
/// Longest text of one, in bytes.
const MAX_TEXT: usize = 400;

/// The last events.
#[derive(Debug)]
pub(crate) struct Events {
    ring: Mutex<Log>,
    /// The number of the last one.
    last: watch::Sender<u64>,
}

impl Default for Events {
    fn default() -> Self {
        Self {
            ring: Mutex::default(),
            last: watch::Sender::new(0),
        }
    }
}

/// The last events, the latest last; numbered from 1 without a gap.
#[derive(Debug, Default)]
struct Log {
    number: u64,
    kept: Ring<Event, MAX_EVENTS>,
}

impl Log {
    fn push(&mut self, mut event: Event) -> u64 {
        self.number += 1;
        event.number = self.number;
        event.text = cut(event.text, MAX_TEXT);
        // That of a request which was refused may be no name.
        event.tenant = event.tenant.map(|name| cut(name, MAX_NAME));
        self.kept.push(event);
        self.number
    }

    /// Those with a higher number, as far as they are kept.
    fn after(&self, number: u64) -> Vec<Event> {
        let kept = self.kept.iter();
        kept.skip_while(|event| event.number <= number)
            .cloned()
            .collect()
    }
}

impl Events {
    /// Something has happened to a tenant of this user, or to a group.
    pub(crate) fn push(&self, kind: EventKind, tenant: Option<(&str, u32)>, text: String) {
        let event = Event {
            number: 0,
            at_ms: since_1970().as_millis() as u64,
            kind,
            tenant: tenant.map(|(name, _)| name.to_owned()),
            uid: tenant.map(|(_, uid)| uid),
            text,
        };
        let mut ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        self.last.send_replace(ring.push(event));
    }

    /// The number of the last event.
    pub(crate) fn last(&self) -> u64 {
        *self.last.borrow()
    }

    /// All events that are kept.
    pub(crate) fn kept(&self) -> Vec<Event> {
        let ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        ring.after(0)
    }

    /// The events after one of this number; waits until there is one.
    pub(crate) async fn after(&self, number: u64) -> Vec<Event> {
        let mut last = self.last.subscribe();
        // It ends only with its sender, which is borrowed here.
        let _ = last.wait_for(|last| *last > number).await;
        let ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        ring.after(number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(text: String) -> Event {
        Event {
            number: 0,
            at_ms: 0,
            kind: EventKind::Started,
            tenant: None,
            uid: None,
            text,
        }
    }

    #[test]
    fn ring_keeps_the_last_events_in_order() {
        let mut ring = Log::default();
        for n in 1..=MAX_EVENTS as u64 + 10 {
            assert_eq!(ring.push(event("x".repeat(1000))), n);
        }
        let numbers = |after| -> Vec<u64> {
            let events = ring.after(after);
            events.iter().map(|event| event.number).collect()
        };
        assert_eq!(
            numbers(0),
            (11..=MAX_EVENTS as u64 + 10).collect::<Vec<_>>()
        );
        assert_eq!(numbers(MAX_EVENTS as u64 + 8), [1033, 1034]);
        assert!(numbers(5000).is_empty());
        assert_eq!(ring.kept[0].text.len(), MAX_TEXT);
    }

    #[test]
    fn words_of_a_client_take_bounded_room() {
        let mut ring = Log::default();
        let long = "€".repeat(20_000);
        ring.push(Event {
            tenant: Some(long.clone()),
            ..event(long)
        });
        let Event { tenant, text, .. } = &ring.kept[0];
        let room = |text: &String| (text.len(), text.capacity());
        assert_eq!(tenant.as_ref().map(room), Some((63, 63)));
        assert_eq!(room(text), (399, 399));
    }

    #[tokio::test]
    async fn waiting_ends_with_the_next_event() {
        let events = Events::default();
        events.push(EventKind::Started, Some(("a", 7)), String::new());
        let waits = events.after(1);
        tokio::pin!(waits);
        tokio::select! {
            biased;
            _ = &mut waits => panic!("nothing has happened"),
            () = std::future::ready(()) => {}
        }
        events.push(EventKind::Ended, Some(("a", 7)), String::new());
        let next = waits.await;
        assert_eq!(
            (next.len(), next[0].number, next[0].kind),
            (1, 2, EventKind::Ended)
        );
        assert_eq!(
            (next[0].tenant.as_deref(), next[0].uid),
            (Some("a"), Some(7))
        );
        assert_eq!(events.last(), 2);
    }
}
