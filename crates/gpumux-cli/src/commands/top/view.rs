//! What is shown, and what keys do: no terminal, no clock.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use gpumux_core::{Class, TenantSpec};
use gpumux_daemon::api::types::{DeviceMemory, Domain, SpecChange, Status, Tenant};
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

/// Looks that the timeline goes back.
pub(super) const PAST: usize = 64;

/// What the daemon said.
pub(super) struct Answer {
    pub(super) status: Status,
    pub(super) tenants: Vec<Tenant>,
    pub(super) memory: Vec<DeviceMemory>,
    /// About the chosen tenant.
    pub(super) why: String,
}

/// A tenant on a device; or without one, if it has none yet.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Row {
    pub(super) device: String,
    pub(super) promised: f64,
    /// Parts of the time since the last look: on the device, and waiting for it.
    pub(super) received: f64,
    pub(super) waiting: f64,
}

#[derive(Default)]
pub(super) struct View {
    pub(super) answer: Option<Answer>,
    /// Name of the chosen tenant; without one the first is.
    name: Option<String>,
    pub(super) message: String,
    pub(super) rows: BTreeMap<String, Vec<Row>>,
    /// Shares per tenant and device, the latest last.
    pub(super) past: BTreeMap<(String, String), VecDeque<f64>>,
    /// Per domain: when it was looked at, and its device and waiting time then, in µs.
    before: BTreeMap<u64, (Duration, u64, u64)>,
}

pub(super) enum Key {
    Nothing,
    Quit,
    Change(String, SpecChange),
    /// Move its memory to the host, or back.
    Sleep(String),
    Wake(String),
}

impl View {
    /// The daemon's answer at this time since any beginning.
    pub(super) fn update(&mut self, answer: Answer, at: Duration) {
        let mut before = BTreeMap::new();
        self.rows.clear();
        for tenant in &answer.tenants {
            let mut rows: BTreeMap<&str, Row> = BTreeMap::new();
            for domain in &tenant.domains {
                let (received, waiting) = self.lately(domain, at);
                before.insert(domain.id, (at, domain.received_us, domain.waited_us));
                let row = rows.entry(&domain.device).or_default();
                row.device = domain.device.clone();
                row.promised = row.promised.max(domain.promised_share);
                row.received += received;
                row.waiting = row.waiting.max(waiting);
            }
            let mut rows: Vec<Row> = rows.into_values().collect();
            if rows.is_empty() {
                rows.push(Row::default());
            }
            self.rows.insert(tenant.name.clone(), rows);
        }
        self.before = before;
        let rows = &self.rows;
        let lives = |(name, device): &(String, String)| {
            rows.get(name)
                .is_some_and(|rows| rows.iter().any(|row| row.device == *device))
        };
        self.past.retain(|key, _| lives(key));
        for (name, rows) in rows {
            for row in rows {
                let past = self
                    .past
                    .entry((name.clone(), row.device.clone()))
                    .or_default();
                past.push_back(row.received);
                while past.len() > PAST {
                    past.pop_front();
                }
            }
        }
        self.answer = Some(answer);
        self.message.clear();
    }

    /// Parts of the time since the last look.
    fn lately(&self, domain: &Domain, at: Duration) -> (f64, f64) {
        let Some((then, received, waited)) = self.before.get(&domain.id) else {
            return (domain.received_share, 0.0);
        };
        let elapsed = at.saturating_sub(*then).as_micros().max(1) as f64;
        let part = |now: u64, old: u64| (now.saturating_sub(old) as f64 / elapsed).min(1.0);
        (
            part(domain.received_us, *received),
            part(domain.waited_us, *waited),
        )
    }

    pub(super) fn say(&mut self, message: String) {
        self.message = message;
    }

    /// The chosen one of these.
    pub(super) fn chosen<'a>(&self, tenants: &'a [Tenant]) -> Option<&'a Tenant> {
        let named = tenants
            .iter()
            .find(|tenant| Some(&tenant.name) == self.name.as_ref());
        named.or(tenants.first())
    }

    pub(super) fn key(&mut self, key: KeyEvent) -> Key {
        let tenants = self
            .answer
            .as_ref()
            .map_or(&[][..], |answer| &answer.tenants);
        let Some(chosen) = self.chosen(tenants) else {
            return match is_quit(key) {
                true => Key::Quit,
                false => Key::Nothing,
            };
        };
        let index = tenants
            .iter()
            .position(|tenant| tenant.name == chosen.name)
            .unwrap_or(0);
        let change = |change| Key::Change(chosen.name.clone(), change);
        let class = |class| {
            change(SpecChange {
                class: Some(class),
                ..SpecChange::default()
            })
        };
        let weight = |factor: f64| {
            let (least, most) = (*TenantSpec::WEIGHTS.start(), *TenantSpec::WEIGHTS.end());
            let weight = Some((chosen.spec.weight * factor).clamp(least, most));
            change(SpecChange {
                weight,
                ..SpecChange::default()
            })
        };
        let to = match key.code {
            _ if is_quit(key) => return Key::Quit,
            KeyCode::Char('l') => return class(Class::Latency),
            KeyCode::Char('s') => return class(Class::Standard),
            KeyCode::Char('b') => return class(Class::Batch),
            KeyCode::Char('+' | '=') => return weight(2.0),
            KeyCode::Char('-') => return weight(0.5),
            KeyCode::Char('z') => return Key::Sleep(chosen.name.clone()),
            KeyCode::Char('w') => return Key::Wake(chosen.name.clone()),
            KeyCode::Up | KeyCode::Char('k') => index.saturating_sub(1),
            KeyCode::Down | KeyCode::Char('j') => (index + 1).min(tenants.len() - 1),
            _ => return Key::Nothing,
        };
        self.name = Some(tenants[to].name.clone());
        Key::Nothing
    }
}

fn is_quit(key: KeyEvent) -> bool {
    let interrupt = key.modifiers.contains(KeyModifiers::CONTROL) && key.code == KeyCode::Char('c');
    interrupt || matches!(key.code, KeyCode::Char('q') | KeyCode::Esc)
}
