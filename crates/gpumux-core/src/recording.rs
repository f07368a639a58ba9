//! Recordings of the planners: what they were given, when, and what they decided. The same planners decide the same again, so a recording
//! of a daemon shows that it runs them as the simulator and the tests do, and a kept one shows what a change decides differently.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{
    Micros,
    broker::{self, Broker},
    controller::{Call, Controller},
    policy,
};

/// One line of a recording.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Line {
    /// A new broker, for so much host memory in bytes.
    Broker(u64),
    /// The broker was given this event and answered with these commands.
    Memory(Micros, broker::Event, Vec<broker::Command>),
    /// The controller was called so.
    Compute(Micros, Call),
}

/// New planners, which are given what a recording holds.
pub struct Replay {
    broker: Broker,
    controller: Controller,
}

impl Default for Replay {
    fn default() -> Self {
        Self {
            broker: Broker::new(u64::MAX),
            controller: Controller::new(BTreeMap::new()),
        }
    }
}

impl Replay {
    /// Gives the planners what a line holds. Returns the line with what they decide.
    ///
    /// # Errors
    /// The name of a policy that there is not.
    pub fn again(&mut self, line: &Line) -> Result<Line, String> {
        let mut line = line.clone();
        match &mut line {
            Line::Broker(host) => self.broker = Broker::new(*host),
            Line::Memory(now, event, commands) => {
                *commands = self.broker.handle(*now, event.clone());
            }
            Line::Compute(now, call) => self.call(*now, call)?,
        }
        Ok(line)
    }

    fn call(&mut self, now: Micros, call: &mut Call) -> Result<(), String> {
        let controller = &mut self.controller;
        match call {
            Call::Device(place, name, costs) => {
                let policy = policy::by_name(name).ok_or_else(|| name.clone())?.into();
                match *place {
                    Some(place) => controller.replace_device(place, policy, *costs, now),
                    None => drop(controller.add_device(policy, *costs, now)),
                }
            }
            Call::Weight(user, weight) => controller.set_weight(*user, *weight),
            Call::Foreign(device, used) => controller.see_foreign(*device, now, *used),
            Call::Looked(device) => controller.looked(*device, now),
            Call::Account(device) => controller.account_until(*device, now),
            Call::Handle(event) => controller.handle(now, event.clone()),
            Call::Poll(command) => *command = controller.poll(now),
        }
        Ok(())
    }
}
