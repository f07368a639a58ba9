//! The step that brings the devices from what is to what shall be.

use std::collections::BTreeSet;

use gpumux_core::{Class, Hints, Micros, broker::Event};
use gpumux_wire::{Daemon, page::SLOTS};

use super::{domain::Domain, engine::Engine};
use crate::devices::Known;

impl Engine {
    /// Renews the lease of all sessions.
    pub(super) fn renew(&self) {
        if let Some(stalled) = self.renewal.renew()
            && !self.state.sessions.is_empty()
        {
            tracing::warn!(
                ms = stalled.0 / 1000,
                "the scheduling thread stood still: the processes may have freed themselves"
            );
        }
    }

    /// All devices that exist, also where no tenant has shown them yet. Others that existed before are gone.
    pub(super) fn know_devices(&mut self, devices: impl IntoIterator<Item = Known>) {
        let (others, devices): (Vec<Known>, Vec<Known>) =
            devices.into_iter().partition(|it| it.other.is_some());
        let others = others.into_iter();
        self.others = others.filter_map(|it| Some((it.uuid, it.other?))).collect();
        let exists = |uuid: &String| devices.iter().any(|known| known.uuid == *uuid);
        let before = self.admission.numbers.keys();
        let gone: Vec<String> = before.filter(|uuid| !exists(uuid)).cloned().collect();
        for uuid in gone {
            // What is still used is asked for again at the next look.
            if self.state.forget_device(&uuid) {
                self.admission.numbers.remove(&uuid);
                self.admission.sms.remove(&uuid);
                self.admission.foreign.remove(&uuid);
                self.memory_event(Event::DeviceGone(uuid));
            }
        }
        for known in devices {
            self.memory_event(Event::Device {
                uuid: known.uuid.clone(),
                capacity: known.memory_bytes,
                used: known.memory_used,
            });
            self.admission.numbers.insert(known.uuid.clone(), known.gpu);
            let sms = known.sms.map(|sms| (known.uuid.clone(), sms));
            self.admission.sms.extend(sms);
            let foreign = self
                .admission
                .foreign
                .entry(known.uuid.clone())
                .or_default();
            let used_by = known.used_by.as_ref().map(|used| &used.parts);
            foreign.see(&self.state, &known.uuid, known.processes, used_by);
            let foreign = foreign.used();
            let policy = self.config.policy_of(&known.uuid);
            let device = self.state.device(known.uuid.clone(), policy);
            device.link = known.link;
            let index = device.index;
            let now = self.state.now();
            self.state.controller.see_foreign(index, now, foreign);
            let state = &mut self.state;
            self.tampers.watch_frozen(state, &known.uuid, known.used_by);
            self.judge();
        }
        self.expire_guarantees();
    }

    /// Processes that may be stopped.
    pub(super) fn standing(&self) -> BTreeSet<u32> {
        let now = self.state.now();
        let devices = self.state.devices.values();
        devices.flat_map(|device| device.standing(now)).collect()
    }

    /// Of all processes, these are stopped.
    pub(super) fn set_stopped(&mut self, stopped: &BTreeSet<u32>) {
        let now = self.state.now();
        for device in self.state.devices.values_mut() {
            device.set_stopped(now, stopped, &mut self.state.controller);
        }
    }

    /// Brings every device to what its policy wants now. Returns when to do so again at the
    /// latest; none: when something happens.
    pub(super) fn step(&mut self) -> Option<Micros> {
        if self.stopped {
            return None;
        }
        self.moves.step(&mut self.state);
        let start = self.state.now();
        self.leave_expired();
        let cost = self.cost + self.waking;
        let mut sampled = true;
        for device in self.state.devices.values_mut() {
            let (controller, clock) = (&mut self.state.controller, &self.state.clock);
            sampled &= device.observe(start, controller, clock, cost);
            for held in device.release(start, &mut self.state.controller) {
                self.crashes.released(device, &held, start);
                let _ = self.state.reaper.send(Box::new(held));
            }
        }
        self.state.share_links(start);
        self.judge();
        self.crashes.report(&mut self.state);
        self.crashes.report_stuck(&mut self.state, start);
        if self.expiry.lapsed().next().is_some() {
            self.expire_guarantees();
        }
        let observed = self.state.now();
        let planning = self.control(sampled);
        self.report_withheld();
        self.tell_hints(observed);
        let took = observed.saturating_sub(start) + planning;
        self.cost = smooth(self.cost, took);
        self.stats.busy_s += took.as_secs_f64();
        let now = self.state.now();
        self.steps.record(now.saturating_sub(start));
        self.moves.step(&mut self.state);
        self.write_recording();
        let cost = self.cost + self.waking;
        (self.state.devices.values())
            .filter_map(|device| device.due(&self.state.controller, cost))
            .chain(self.state.controller.next_wakeup())
            .chain(self.moves.due(now))
            .min()
    }

    /// Carries out what the controller decides, until it has no more to do now. `sampled`: all devices have just been sampled.
    /// Returns how long the planning took.
    fn control(&mut self, mut sampled: bool) -> Micros {
        let domains = self.state.devices.values().map(|it| it.domains.len());
        // Even a policy that always changes its mind must not keep the thread from everything else.
        let most = 4 * (1 + domains.sum::<usize>());
        let mut planning = Micros::ZERO;
        let plans = self.state.controller.plans();
        for _ in 0..most {
            let now = self.state.now();
            if (self.state.controller.next_wakeup()).is_none_or(|at| at > now) {
                break;
            }
            // The newest that can be known: controls take longer than a request, and a process may have freed itself.
            self.leave_expired();
            if !std::mem::take(&mut sampled) {
                self.state.sample(now);
            }
            let command = self.state.controller.poll(now);
            let took = self.state.now().saturating_sub(now);
            planning += took;
            self.stats.plan_max_us = self.stats.plan_max_us.max(took.0);
            let Some(command) = command else {
                continue;
            };
            let mut devices = self.state.devices.values_mut();
            if let Some(device) = devices.find(|it| it.index == command.device) {
                let (controller, clock) = (&mut self.state.controller, &self.state.clock);
                device.carry_out(&command, controller, clock);
            }
        }
        let made = self.state.controller.plans() - plans;
        if made > 0 {
            let now = self.state.now();
            self.stats.plans += made;
            for device in self.state.devices.values_mut() {
                device.record_reasons(now, &self.state.controller);
            }
        }
        planning
    }

    /// Tells processes where taking the device ahead of their work may pay, when that has changed.
    fn tell_hints(&mut self, now: Micros) {
        for (id, met) in &mut self.state.sessions {
            let spec = self.state.tenants.get(&met.tenant);
            let wanted =
                spec.filter(|spec| spec.class == Class::Latency && spec.hints != Hints::Off);
            let mut contended = 0;
            let devices = self.state.devices.values().filter(|_| wanted.is_some());
            let domains = devices.flat_map(|it| it.domains.values());
            // A reservation kernel takes nothing from groups that wait to launch.
            let own = |it: &&Domain| it.member.session == *id && it.launches.is_none();
            for domain in domains.filter(own) {
                let key = domain.member.key;
                if key < SLOTS as u32 && self.state.controller.contended(domain.who.id, now) {
                    contended |= 1 << key;
                }
            }
            let automatic = wanted.is_some_and(|spec| spec.hints == Hints::Auto);
            let tell = (contended, contended != 0 && automatic);
            let (contended, automatic) = tell;
            let message = Daemon::Hints {
                contended,
                automatic,
            };
            if met.told != tell && met.send(&message) {
                met.told = tell;
            }
        }
    }

    /// Whether there is a process to control.
    pub(super) fn has_sessions(&self) -> bool {
        !self.state.sessions.is_empty()
    }

    /// Takes note of the CPU time that waking up for a step took.
    pub(super) fn woke(&mut self, took: Micros) {
        self.waking = smooth(self.waking, took);
    }
}

/// An average over some eight values.
fn smooth(average: Micros, value: Micros) -> Micros {
    Micros((average.0 * 7 + value.0).div_ceil(8))
}
