//! Copies between the host and a device: what the processes count, and the rates to which they are limited. [`gpumux_core::link`]
//! decides for tenants.

use std::collections::BTreeMap;

use gpumux_core::{Micros, TenantId};
use gpumux_wire::Daemon;

use super::{device::Device, domain::Domain, state::State};

/// A limit that differs by less is the same.
const SAME: f64 = 0.02;

/// What a GPU's link is assumed to carry where NVML does not report it: PCIe 3.0 with 16 lanes. For an emulated device nothing is assumed.
const LINK: u64 = 15_754_000_000;

/// What the domains of a tenant copy in one direction.
#[derive(Clone, Copy, Debug, Default)]
struct Copied {
    bytes: u64,
    domains: u64,
}

impl Copied {
    /// A domain's part of the tenant's limit, as it copied so much of that. One that begins to copy has some.
    fn part(self, bytes: u64) -> f64 {
        let least = (self.bytes / 8).max(1) as f64;
        let sum = self.bytes as f64 + least;
        (bytes as f64 + least / self.domains as f64) / sum
    }
}

impl State {
    /// Looks at what was copied, where it is time to, and limits tenants that copy more than their shares.
    pub(super) fn share_links(&mut self, now: Micros) {
        let due = |(uuid, device): (&String, &Device)| {
            let due = device.links[0].is_due(now) && !device.domains.is_empty();
            due.then(|| uuid.clone())
        };
        let due: Vec<String> = self.devices.iter().filter_map(due).collect();
        for uuid in due {
            if let Some(mut device) = self.devices.remove(&uuid) {
                self.share_link(now, &mut device);
                self.devices.insert(uuid, device);
            }
        }
    }

    fn share_link(&self, now: Micros, device: &mut Device) {
        let index = device.index;
        let elapsed = device.links[0].since(now).as_secs_f64();
        for domain in device.domains.values_mut() {
            domain.note_copies(elapsed);
        }
        let capacity = match device.emulated {
            true => 0,
            false => device.link.unwrap_or(LINK),
        };
        let mut limits = BTreeMap::new();
        for (n, link) in device.links.iter_mut().enumerate() {
            link.set_capacity(capacity);
            let mut copied: BTreeMap<TenantId, Copied> = BTreeMap::new();
            for domain in device.domains.values() {
                let all = copied.entry(domain.who.tenant).or_default();
                all.bytes = all.bytes.saturating_add(domain.copies.new[n]);
                all.domains += 1;
            }
            let bytes = copied.iter().map(|(tenant, all)| (*tenant, all.bytes));
            let shares = |tenants: &[TenantId]| {
                let bounds = self.bounds(index, &tenants.iter().copied().collect());
                let share = |tenant| bounds.get(tenant).map_or(0.0, |bound| bound.share);
                tenants.iter().map(share).collect()
            };
            let own = link.look(now, &bytes.collect(), shares);
            for (id, domain) in &device.domains {
                let limit = own.get(&domain.who.tenant).map(|limit| {
                    let part = copied[&domain.who.tenant].part(domain.copies.new[n]);
                    (limit * part) as u64
                });
                limits.entry(*id).or_insert([None; 2])[n] = limit;
            }
        }
        for (domain, limits) in device.domains.values_mut().zip(limits.into_values()) {
            self.limit(domain, limits);
        }
    }

    /// Sends a process its limits if they changed.
    fn limit(&self, domain: &mut Domain, limits: [Option<u64>; 2]) {
        let before = domain.copies.limits;
        let same = |(a, b): (Option<u64>, Option<u64>)| match (a, b) {
            (Some(a), Some(b)) => a.abs_diff(b) as f64 <= SAME * b as f64,
            _ => a == b,
        };
        if limits.into_iter().zip(before).all(same) || !domain.limits_copies() {
            return;
        }
        let key = domain.member.key;
        let rates = limits;
        if self.send(domain.member.session, &Daemon::CopyRates { key, rates }) {
            domain.copies.limits = limits;
        }
    }
}
