//! Scenarios: tenants and their devices, what they ask for, and how the devices are run.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;

use gpumux_core::admission::{self, Booking, Refusal, Reserve, Room, UserPolicy};
use gpumux_core::policy::{self, Tuning};
use gpumux_core::space::Sharing;
use gpumux_core::{Class, Costs, TenantId, TenantSpec, Timeslice, UserId};
use serde::{Deserialize, Serialize};

use crate::arrivals::{Arrival, Request};
use crate::gpu::Hardware;
use crate::memory::{MemoryModel, gib};
use crate::mode::Mode;

/// A scenario, as written in TOML.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    /// What it is called.
    #[serde(default)]
    pub name: String,
    /// What it shows, for people.
    #[serde(default)]
    pub about: String,
    /// Length in simulated seconds, `warmup_s` included.
    pub seconds: f64,
    /// What happens before this moment is not reported.
    #[serde(default = "defaults::warmup_s")]
    pub warmup_s: f64,
    /// Number of devices.
    #[serde(default = "defaults::one")]
    pub devices: usize,
    /// Seed of everything random.
    #[serde(default)]
    pub seed: u64,
    /// How to run it; one report each.
    #[serde(default = "defaults::modes")]
    pub modes: Vec<Mode>,
    /// The daemon's policy.
    #[serde(default = "defaults::policy")]
    pub policy: String,
    /// Its tuning.
    #[serde(default)]
    pub tuning: Tuning,
    /// How much later than the device the daemon notices that a domain has work, or has none any more.
    #[serde(default = "defaults::demand_delay_us")]
    pub demand_delay_us: u64,
    /// What the daemon pays for its controls.
    #[serde(default)]
    pub costs: Costs,
    /// Length of the windows in which shares are compared.
    #[serde(default = "defaults::window_s")]
    pub window_s: f64,
    /// The devices' constants.
    #[serde(default)]
    pub hardware: Hardware,
    /// Their memory, if tenants have some.
    #[serde(default)]
    pub memory: MemoryModel,
    /// Weights of users; 1 for those that are not named.
    #[serde(default)]
    pub users: BTreeMap<String, f64>,
    /// The tenants that share the devices.
    #[serde(rename = "tenant")]
    pub tenants: Vec<Tenant>,
    /// Request traces by name, set with [`Scenario::add_trace`].
    #[serde(skip)]
    pub(crate) traces: BTreeMap<String, Vec<Request>>,
}

/// A tenant, or several of a kind.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tenant {
    /// Its name. Of several of a kind, `-1`, `-2`, … are appended.
    pub name: String,
    /// How many of this kind.
    #[serde(default = "defaults::one")]
    pub count: usize,
    /// Whose it is: the device is divided among users first. All that name none are one user's.
    #[serde(default)]
    pub user: String,
    /// See [`TenantSpec::class`].
    #[serde(default)]
    pub class: Class,
    /// See [`TenantSpec::guaranteed`].
    #[serde(default)]
    pub guaranteed: f64,
    /// See [`TenantSpec::limit`].
    #[serde(default = "defaults::whole")]
    pub limit: f64,
    /// See [`TenantSpec::weight`].
    #[serde(default = "defaults::whole")]
    pub weight: f64,
    /// See [`TenantSpec::latency_objective_us`].
    pub latency_objective_us: Option<u64>,
    /// What it needs of each of its devices' memory to run. Where a daemon runs, and tenants share in time.
    #[serde(default)]
    pub memory_gib: f64,
    /// See [`TenantSpec::memory_guaranteed`].
    #[serde(default)]
    pub memory_guaranteed_gib: f64,
    /// Its trust domain: with others of the same it may share a group.
    pub trust: Option<String>,
    /// Whether it wants to.
    #[serde(default)]
    pub sharing: Sharing,
    /// The devices it works on, each request on all of them together.
    #[serde(default = "defaults::devices")]
    pub devices: Vec<usize>,
    /// In mode `time-slicing`: a slice set by hand, in µs.
    pub timeslice_us: Option<u64>,
    /// When it comes.
    #[serde(default)]
    pub start_s: f64,
    /// When it goes; it stays if unset.
    pub stop_s: Option<f64>,
    /// When its requests come.
    pub arrival: Arrival,
    /// What a request is.
    pub work: Work,
}

/// What a request is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Work {
    /// A number of kernels, one after the other.
    Kernels {
        /// How many.
        #[serde(default = "defaults::one")]
        kernels: usize,
        /// How long each takes, without the overhead that every kernel pays.
        kernel_us: f64,
        /// SMs each can use; all by default.
        sms: Option<u32>,
        /// Host time to launch one. At 0 all are launched at once, as a captured graph is; in an eager program the host is
        /// often slower than the device.
        #[serde(default)]
        launch_us: f64,
        /// Standard deviation of a request's duration over its mean.
        #[serde(default)]
        cv: f64,
        /// Host time before a request's first launch, in which the program does nothing else.
        #[serde(default)]
        prepare_us: f64,
        /// The program says so long before a request that it comes, and two hold kernels take the device.
        hint_us: Option<f64>,
    },
    /// A language model with continuous batching: what has arrived is prefilled, then all active requests
    /// get one token per step. Needs a trace.
    Llm {
        /// Prefill per token of context.
        prefill_us_per_token: f64,
        /// One step for all active requests.
        decode_us: f64,
        /// Most requests in a step.
        max_batch: usize,
    },
}

/// Defaults of fields.
mod defaults {
    use super::Mode;

    pub(super) fn warmup_s() -> f64 {
        1.0
    }
    pub(super) fn one() -> usize {
        1
    }
    pub(super) fn modes() -> Vec<Mode> {
        vec![Mode::Gpumux]
    }
    pub(super) fn policy() -> String {
        gpumux_core::policy::NAMES[0].to_owned()
    }
    pub(super) fn demand_delay_us() -> u64 {
        500
    }
    pub(super) fn window_s() -> f64 {
        1.0
    }
    pub(super) fn whole() -> f64 {
        1.0
    }
    pub(super) fn devices() -> Vec<usize> {
        vec![0]
    }
}

/// Why a scenario cannot be run.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    /// Not TOML, an unknown field, or a value of the wrong kind.
    #[error("the scenario cannot be read: {0}")]
    Toml(String),
    /// A number that makes no sense.
    #[error("{field} {value} is not valid: use {instead}")]
    Number {
        /// Which.
        field: String,
        /// What it is.
        value: f64,
        /// What it could be.
        instead: String,
    },
    /// Nothing to play.
    #[error("`{0}` is empty: name at least one")]
    Nothing(&'static str),
    /// A trace of what has none.
    #[error(
        "mode `alone` plays every tenant by itself and has no trace: put another mode last in `modes`"
    )]
    TraceOfAlone,
    /// No such policy.
    #[error("unknown policy `{0}`: use {list}", list = gpumux_core::policy::NAMES.join(", "))]
    Policy(String),
    /// A tenant names a device that there isn't.
    #[error("tenant `{tenant}` names device {device}, but there are {devices}, counted from 0")]
    Device {
        /// Who.
        tenant: String,
        /// What it names.
        device: usize,
        /// How many there are.
        devices: usize,
    },
    /// A weight of a user without tenants.
    #[error("`users` names `{0}`, and no tenant's `user` is `{0}`: name one that is")]
    User(String),
    /// Two tenants of one name.
    #[error("two tenants are called `{0}`: give each its own name")]
    Name(String),
    /// A guarantee that makes no sense, or is rejected.
    #[error("tenant `{tenant}`: {error}")]
    Spec {
        /// Whose.
        tenant: String,
        /// Why.
        error: Box<Refusal>,
    },
    /// A group works on one device.
    #[error(
        "tenant `{0}` names a trust domain and several devices: in a group it could not wait for itself, use one device"
    )]
    TrustedGang(String),
    /// A trace was named and not brought.
    #[error("tenant `{tenant}` needs the trace `{name}`, which was not given")]
    NoTrace {
        /// Who.
        tenant: String,
        /// Which.
        name: String,
    },
    /// A language model without a trace.
    #[error("tenant `{0}` is a language model and needs a trace: set arrival.kind = \"trace\"")]
    LlmWithoutTrace(String),
    /// A line of a trace.
    #[error("line {line} of trace `{name}`: {problem}")]
    Trace {
        /// Which trace.
        name: String,
        /// Which line, from 1.
        line: usize,
        /// What is wrong.
        problem: String,
    },
}

impl Scenario {
    /// Reads a scenario and checks it. Traces that it names must be added before it can run.
    ///
    /// # Errors
    /// Names the first thing that is wrong.
    pub fn from_toml(text: &str) -> Result<Self, Error> {
        let scenario: Self =
            toml::from_str(text).map_err(|error| Error::Toml(error.to_string()))?;
        scenario.check()?;
        Ok(scenario)
    }

    /// The names of the traces that it needs.
    pub fn trace_names(&self) -> BTreeSet<&str> {
        let arrivals = self.tenants.iter().map(|tenant| &tenant.arrival);
        arrivals
            .filter_map(|arrival| match arrival {
                Arrival::Trace { name, .. } => Some(name.as_str()),
                _ => None,
            })
            .collect()
    }

    /// Adds the text of a trace: CSV with the columns `TIMESTAMP,ContextTokens,GeneratedTokens`.
    ///
    /// # Errors
    /// Names the first line that cannot be read.
    pub fn add_trace(&mut self, name: &str, csv: &str) -> Result<(), Error> {
        let requests = crate::parse_trace(csv).map_err(|(line, problem)| Error::Trace {
            name: name.to_owned(),
            line,
            problem,
        })?;
        self.traces.insert(name.to_owned(), requests);
        Ok(())
    }

    /// The number of a tenant's user.
    pub(crate) fn user_of(&self, tenant: &Tenant) -> UserId {
        let names: BTreeSet<&str> = self.tenants.iter().map(|it| it.user.as_str()).collect();
        let at = names.iter().position(|name| *name == tenant.user);
        UserId(at.unwrap_or_default() as u32)
    }

    /// The weights of users.
    pub(crate) fn user_weights(&self) -> BTreeMap<UserId, f64> {
        let weight = |tenant: &Tenant| {
            let weight = self.users.get(&tenant.user)?;
            Some((self.user_of(tenant), *weight))
        };
        self.tenants.iter().filter_map(weight).collect()
    }

    /// Checks everything but that traces are there.
    fn check(&self) -> Result<(), Error> {
        within("seconds", self.seconds, 1e-3..=1e6)?;
        if !(0.0..self.seconds).contains(&self.warmup_s) {
            let instead = format!("0 or more, and less than seconds ({})", self.seconds);
            return Err(Error::number("warmup_s", self.warmup_s, instead));
        }
        within("window_s", self.window_s, 1e-3..=1e6)?;
        within("devices", self.devices as f64, 1.0..=64.0)?;
        within("demand_delay_us", self.demand_delay_us as f64, 0.0..=1e7)?;
        if policy::by_name(&self.policy).is_none() {
            return Err(Error::Policy(self.policy.clone()));
        }
        for (what, empty) in [
            ("modes", self.modes.is_empty()),
            ("tenant", self.tenants.is_empty()),
        ] {
            if empty {
                return Err(Error::Nothing(what));
            }
        }
        self.check_tuning()?;
        self.check_costs()?;
        self.check_hardware()?;
        within("memory.device_gib", self.memory.device_gib, 1e-3..=1e6)?;
        within("memory.link_gbps", self.memory.link_gbps, 1e-3..=1e6)?;
        within("memory.fixed_ms", self.memory.fixed_ms, 0.0..=1e6)?;
        for (user, weight) in &self.users {
            within(&format!("users.{user}"), *weight, TenantSpec::WEIGHTS)?;
            if self.tenants.iter().all(|tenant| tenant.user != *user) {
                return Err(Error::User(user.clone()));
            }
        }
        let mut names = BTreeSet::new();
        let mut booked: BTreeMap<usize, Vec<Booking>> = BTreeMap::new();
        for tenant in &self.tenants {
            within(&tenant.field("count"), tenant.count as f64, 1.0..=1000.0)?;
            for name in tenant.names() {
                if !names.insert(name.clone()) {
                    return Err(Error::Name(name));
                }
            }
            self.check_devices(tenant, &mut booked)?;
            tenant.check(self.memory.device_gib)?;
        }
        Ok(())
    }

    fn check_tuning(&self) -> Result<(), Error> {
        let tuning = &self.tuning;
        for (field, value) in [
            ("tuning.quantum_cost", tuning.quantum_cost),
            ("tuning.batch_quantum_cost", tuning.batch_quantum_cost),
            ("tuning.slice_cost", tuning.slice_cost),
            ("tuning.batch_slice_cost", tuning.batch_slice_cost),
        ] {
            within(field, value, 1e-3..=1.0)?;
        }
        within("tuning.period", tuning.period.0 as f64, 1e3..=1e8)?;
        within("tuning.hog", tuning.hog.0 as f64, 0.0..=1e9)?;
        within("tuning.recent", tuning.recent.0 as f64, 0.0..=1e9)
    }

    fn check_costs(&self) -> Result<(), Error> {
        let costs = &self.costs;
        for (field, value) in [
            ("costs.switch", costs.switch),
            ("costs.freeze", costs.freeze),
            ("costs.thaw", costs.thaw),
            ("costs.set_timeslice", costs.set_timeslice),
        ] {
            within(field, value.0 as f64, 0.0..=1e6)?;
        }
        Ok(())
    }

    fn check_hardware(&self) -> Result<(), Error> {
        let hardware = &self.hardware;
        within("hardware.sms", f64::from(hardware.sms), 1.0..=1e4)?;
        for (field, ns) in [
            ("hardware.switch_base", hardware.switch_base),
            ("hardware.switch_fill", hardware.switch_fill),
            ("hardware.restore", hardware.restore),
            ("hardware.linger", hardware.linger),
            ("hardware.kernel_overhead", hardware.kernel_overhead),
            ("hardware.hold_exit", hardware.hold_exit),
            ("hardware.copy_overhead", hardware.copy_overhead),
            ("hardware.copy_switch", hardware.copy_switch),
        ] {
            within(field, ns as f64, 0.0..=1e9)?;
        }
        for (field, rate) in [
            ("hardware.host_to_device", hardware.host_to_device),
            ("hardware.device_to_host", hardware.device_to_host),
            ("hardware.device_to_device", hardware.device_to_device),
        ] {
            within(field, rate as f64, 1e3..=1e18)?;
        }
        Ok(())
    }

    /// The devices of a tenant, and what is guaranteed there.
    fn check_devices(
        &self,
        tenant: &Tenant,
        booked: &mut BTreeMap<usize, Vec<Booking>>,
    ) -> Result<(), Error> {
        let distinct: BTreeSet<_> = tenant.devices.iter().collect();
        if distinct.is_empty() || distinct.len() != tenant.devices.len() {
            let count = tenant.devices.len() as f64;
            let instead = "one or more, each device once".to_owned();
            return Err(Error::number(&tenant.field("devices"), count, instead));
        }
        for &device in &tenant.devices {
            if device >= self.devices {
                return Err(Error::Device {
                    tenant: tenant.name.clone(),
                    device,
                    devices: self.devices,
                });
            }
            let booked = booked.entry(device).or_default();
            let spec = tenant.spec();
            for _ in 0..tenant.count {
                let request = admission::Request {
                    tenant: TenantId(booked.len() as u64 + 1),
                    user: UserId::default(),
                    spec: &spec,
                    before: None,
                };
                let room = Room {
                    device: format!("device {device}"),
                    memory: Some(gib(self.memory.device_gib)),
                    booked: booked.clone(),
                    foreign: Vec::new(),
                };
                let admitted = admission::admit(
                    &request,
                    &UserPolicy::unlimited(),
                    &Reserve::none(),
                    &[room],
                );
                admitted.map_err(|error| Error::Spec {
                    tenant: tenant.name.clone(),
                    error: Box::new(error),
                })?;
                booked.push(Booking {
                    tenant: request.tenant,
                    name: tenant.name.clone(),
                    guaranteed: spec.guaranteed,
                    memory: spec.memory_guaranteed,
                    user: request.user,
                    privileged: true,
                });
            }
        }
        match tenant.trust.is_some() && tenant.devices.len() > 1 {
            true => Err(Error::TrustedGang(tenant.name.clone())),
            false => Ok(()),
        }
    }

    /// Checks that all traces are there.
    pub(crate) fn check_traces(&self) -> Result<(), Error> {
        for tenant in &self.tenants {
            if let Arrival::Trace { name, .. } = &tenant.arrival
                && !self.traces.contains_key(name)
            {
                return Err(Error::NoTrace {
                    tenant: tenant.name.clone(),
                    name: name.clone(),
                });
            }
        }
        Ok(())
    }
}

/// Refuses a number out of a range.
fn within(field: &str, value: f64, range: RangeInclusive<f64>) -> Result<(), Error> {
    match range.contains(&value) {
        true => Ok(()),
        false => {
            let instead = format!("a number from {} to {}", range.start(), range.end());
            Err(Error::number(field, value, instead))
        }
    }
}

impl Error {
    fn number(field: &str, value: f64, instead: String) -> Self {
        Self::Number {
            field: field.to_owned(),
            value,
            instead,
        }
    }
}

impl Tenant {
    /// How errors call one of its fields.
    fn field(&self, field: &str) -> String {
        format!("tenant `{}`: {field}", self.name)
    }

    /// Checks its numbers by themselves.
    fn check(&self, device_gib: f64) -> Result<(), Error> {
        let within = |of: &str, value: f64, range| within(&self.field(of), value, range);
        within("start_s", self.start_s, 0.0..=1e6)?;
        if let Some(stop) = self.stop_s
            && !(stop > self.start_s && stop.is_finite())
        {
            let instead = format!("a time after start_s ({})", self.start_s);
            return Err(Error::number(&self.field("stop_s"), stop, instead));
        }
        for (of, value) in [
            ("memory_gib", self.memory_gib),
            ("memory_guaranteed_gib", self.memory_guaranteed_gib),
        ] {
            within(of, value, 0.0..=device_gib)?;
        }
        if let Some(slice) = self.timeslice_us {
            let (min, max) = (Timeslice::MIN.0 as f64, Timeslice::MAX.0 as f64);
            within("timeslice_us", slice as f64, min..=max)?;
        }
        // Bounds beyond which nothing sensible is meant, and a run might not end.
        let rates = || 1e-6..=1e6;
        let spreads = || 0.0..=100.0;
        let pauses_us = || 0.0..=1e9;
        match &self.arrival {
            Arrival::Periodic { rate } | Arrival::Poisson { rate } => {
                within("rate", *rate, rates())
            }
            Arrival::Gamma { rate, cv } => {
                within("rate", *rate, rates())?;
                within("cv", *cv, 1e-3..=100.0)
            }
            Arrival::OnOff { rate, on_s, off_s } => {
                within("rate", *rate, rates())?;
                within("on_s", *on_s, 1e-3..=1e6)?;
                within("off_s", *off_s, 0.0..=1e6)
            }
            Arrival::Closed {
                think_us,
                think_cv,
                depth,
            } => {
                within("think_us", *think_us, pauses_us())?;
                within("think_cv", *think_cv, spreads())?;
                within("depth", *depth as f64, 1.0..=1e4)
            }
            Arrival::Trace { speed, .. } => within("speed", *speed, 1e-3..=1e3),
        }?;
        match &self.work {
            Work::Kernels {
                kernels,
                kernel_us,
                sms,
                launch_us,
                cv,
                prepare_us,
                hint_us,
            } => {
                within("kernels", *kernels as f64, 1.0..=1e6)?;
                within("kernel_us", *kernel_us, 1e-3..=1e9)?;
                within("sms", sms.map_or(1.0, f64::from), 1.0..=1e4)?;
                within("launch_us", *launch_us, pauses_us())?;
                within("cv", *cv, spreads())?;
                within("prepare_us", *prepare_us, pauses_us())?;
                within("hint_us", hint_us.unwrap_or(0.0), pauses_us())
            }
            Work::Llm {
                prefill_us_per_token,
                decode_us,
                max_batch,
            } => {
                within("prefill_us_per_token", *prefill_us_per_token, 0.0..=1e6)?;
                within("decode_us", *decode_us, 1e-3..=1e9)?;
                within("max_batch", *max_batch as f64, 1.0..=1e6)?;
                match self.arrival {
                    Arrival::Trace { .. } => Ok(()),
                    _ => Err(Error::LlmWithoutTrace(self.name.clone())),
                }
            }
        }
    }

    /// Its spec.
    pub fn spec(&self) -> TenantSpec {
        TenantSpec {
            class: self.class,
            guaranteed: self.guaranteed,
            limit: self.limit,
            weight: self.weight,
            latency_objective_us: self.latency_objective_us,
            memory_guaranteed: gib(self.memory_guaranteed_gib),
            ..TenantSpec::default()
        }
    }

    /// The names of the tenants of this kind.
    pub fn names(&self) -> Vec<String> {
        match self.count {
            1 => vec![self.name.clone()],
            count => (1..=count).map(|n| format!("{}-{n}", self.name)).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAIR: &str = r#"
        seconds = 10
        [[tenant]]
        name = "serve"
        class = "latency"
        arrival = { kind = "periodic", rate = 100 }
        work = { kind = "kernels", kernels = 10, kernel_us = 10 }
        [[tenant]]
        name = "train"
        class = "batch"
        arrival = { kind = "closed", depth = 2 }
        work = { kind = "kernels", kernel_us = 10000 }
    "#;

    #[test]
    fn a_scenario_is_read_with_its_defaults() {
        let scenario = Scenario::from_toml(PAIR).expect("sound");
        assert_eq!(scenario.modes, [Mode::Gpumux]);
        assert_eq!(scenario.tenants[1].class, Class::Batch);
        assert_eq!(scenario.tenants[0].limit, 1.0);
    }

    #[test]
    fn memory_is_guaranteed_by_each_device_for_itself() {
        let pair = PAIR.replace("seconds = 10", "seconds = 10\ndevices = 2");
        let with = |devices: [&str; 2]| {
            let [serve, train] = devices.map(|it| format!("memory_guaranteed_gib = 50\n{it}"));
            let text = pair.replace("class = \"latency\"", &serve);
            Scenario::from_toml(&text.replace("class = \"batch\"", &train))
        };
        assert!(with(["devices = [0]", "devices = [1]"]).is_ok());
        let error = with(["devices = [0, 1]", "devices = [1]"]).expect_err("too much");
        assert!(
            error
                .to_string()
                .contains("`train`: cannot guarantee 50.0 GiB of device 1"),
            "{error}"
        );
    }

    #[test]
    fn a_run_of_each_alone_has_no_trace() {
        let modes =
            |modes: &str| format!("modes = {modes}{PAIR}").replace("seconds = 10", "seconds = 2");
        let scenario = Scenario::from_toml(&modes(r#"["gpumux", "alone"]"#)).expect("sound");
        assert_eq!(crate::run_traced(&scenario), Err(Error::TraceOfAlone));
        let scenario = Scenario::from_toml(&modes(r#"["alone", "gpumux"]"#)).expect("sound");
        assert!(crate::run_traced(&scenario).is_ok());
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (change, with, message) in [
            ("seconds = 10", "seconds = 0", "seconds 0 is not valid"),
            ("seconds = 10", "seconds = 1e7", "from 0.001 to 1000000"),
            ("seconds = 10", "seconds = nan", "seconds NaN"),
            (
                "seconds = 10",
                "seconds = 10\nwarmup_s = 10",
                "less than seconds (10)",
            ),
            (
                "seconds = 10",
                "seconds = 10\nmodes = []",
                "`modes` is empty",
            ),
            (
                "seconds = 10",
                "seconds = 10\ndemand_delay_us = 18446744073709551615",
                "demand_delay_us 18446744073709552000",
            ),
            (
                "seconds = 10",
                "seconds = 10\nhardware.switch_base = 18446744073709551615",
                "hardware.switch_base 18446744073709552000",
            ),
            (
                "seconds = 10",
                "seconds = 10\nhardware.sms = 0",
                "hardware.sms 0",
            ),
            (
                "seconds = 10",
                "seconds = 10\nhardware.host_to_device = 0",
                "hardware.host_to_device 0",
            ),
            (
                "seconds = 10",
                "seconds = 10\ncosts.freeze = 18446744073709551615",
                "costs.freeze 18446744073709552000",
            ),
            (
                "seconds = 10",
                "seconds = 10\ntuning.quantum_cost = -1",
                "tuning.quantum_cost -1 is not valid: use a number from 0.001 to 1",
            ),
            (
                "seconds = 10",
                "seconds = 10\ntuning.slice_cost = nan",
                "tuning.slice_cost NaN",
            ),
            (
                "seconds = 10",
                "seconds = 10\ntuning.period = 0",
                "tuning.period 0",
            ),
            (
                "class = \"batch\"",
                "timeslice_us = 0",
                "`train`: timeslice_us 0",
            ),
            (
                "class = \"batch\"",
                "timeslice_us = 2_000_000",
                "timeslice_us 2000000 is not valid: use a number from 1 to 1000000",
            ),
            (
                "class = \"latency\"",
                "latency_objective_us = 0",
                "latency objective 0 ms is out of range",
            ),
            ("class = \"latency\"", "stop_s = 0", "after start_s (0)"),
            ("depth = 2", "depth = 1_000_000_000", "depth 1000000000"),
            (
                "rate = 100",
                "rate = 1e12",
                "rate 1000000000000 is not valid",
            ),
            (
                "{ kind = \"periodic\", rate = 100 }",
                "{ kind = \"gamma\", rate = 1, cv = 1e9 }",
                "cv 1000000000",
            ),
            (
                "kernel_us = 10000",
                "kernel_us = 1e-9",
                "kernel_us 0.000000001",
            ),
            ("kernel_us = 10000", "kernel_us = 1, sms = 0", "sms 0"),
            (
                "class = \"batch\"\n",
                "class = \"batch\"\ndevices = []\n",
                "`train`: devices 0",
            ),
            (
                "seconds = 10",
                "seconds = 10\nsecond = 1",
                "unknown field `second`",
            ),
            (
                "seconds = 10",
                "seconds = 10\npolicy = \"fair\"",
                "unknown policy `fair`",
            ),
            ("rate = 100", "rate = -1", "tenant `serve`: rate -1"),
            (
                "rate = 100",
                "rate = 1, jitter = 2",
                "unknown field `jitter`",
            ),
            (
                "name = \"train\"",
                "name = \"serve\"",
                "two tenants are called `serve`",
            ),
            ("class = \"batch\"", "devices = [1]", "names device 1"),
            ("class = \"batch\"", "devices = [0, 0]", "each device once"),
            ("class = \"batch\"", "weight = -1", "weight -1"),
            (
                "class = \"batch\"",
                "guaranteed = 0.6\ncount = 2",
                "cannot guarantee 60% of device 0: guaranteed to train (60%)",
            ),
            (
                "class = \"batch\"",
                "memory_guaranteed_gib = 50\ncount = 2",
                "tenant `train`: cannot guarantee 50.0 GiB of device 0: guaranteed to train (50.0 GiB)",
            ),
            (
                "class = \"batch\"",
                "class = \"urgent\"",
                "unknown variant `urgent`",
            ),
        ] {
            let error = Scenario::from_toml(&PAIR.replace(change, with)).expect_err(message);
            assert!(error.to_string().contains(message), "{error}");
        }
        let text = PAIR.replace("\"serve\"", "\"train-2\"");
        let text = text.replace("class = \"batch\"", "count = 2");
        let twice = Scenario::from_toml(&text).expect_err("one name, two tenants");
        assert!(twice.to_string().contains("called `train-2`"), "{twice}");
        let empty = Scenario::from_toml("seconds = 10\ntenant = []").expect_err("no tenant");
        assert!(empty.to_string().contains("`tenant` is empty"), "{empty}");
    }
}
