//! Host memory that processes make before their first move, so that a move need not wait for it.

use std::{cmp::Reverse, collections::BTreeMap};

use super::{Broker, HOST_PIECE, Place, ProcessId};

/// A device of which less than this part is free (as its reciprocal) is short of memory: tenants there are moved soon.
const SHORT: u64 = 5;

impl Broker {
    /// How much host memory each process shall have made beyond what it keeps, in whole pieces: what it could move, as far as
    /// the limit goes for all together. Tenants on devices that are short of memory come first, of these the largest. Only tenants
    /// whose memory is on the device are named: what the others have made is part of their moves.
    pub fn ahead(&self) -> BTreeMap<ProcessId, u64> {
        let lines = self.accounting.lines();
        let is_short = |uuid: &str| {
            let line = lines.iter().find(|it| it.uuid == uuid);
            line.is_some_and(|it| it.free < it.capacity / SHORT)
        };
        let mut all: Vec<(bool, u64, ProcessId)> = Vec::new();
        for (id, process) in &self.processes {
            let tenant = self.tenants.get(&process.tenant);
            let Some(tenant) = tenant.filter(|it| it.place == Place::Home) else {
                continue;
            };
            let (mut bytes, mut short) = (0u64, false);
            for uuid in self.accounting.uuids() {
                let movable = self.accounting.holding(*id, uuid).movable;
                bytes = bytes.saturating_add(movable);
                short |= movable > 0 && is_short(uuid);
            }
            let bytes = match tenant.activity.in_group {
                true => 0,
                false => bytes.saturating_sub(process.kept),
            };
            all.push((short, bytes, *id));
        }
        all.sort_by_key(|(short, bytes, id)| (Reverse((*short, *bytes)), *id));
        let (kept, limit) = self.on_host();
        let mut room = limit.saturating_sub(kept);
        let granted = all.into_iter().map(|(_, bytes, id)| {
            // Less than a piece is soon made.
            let bytes = match bytes {
                0..HOST_PIECE => 0,
                more => more.div_ceil(HOST_PIECE).min(room / HOST_PIECE) * HOST_PIECE,
            };
            room -= bytes;
            (id, bytes)
        });
        granted.collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{
        Class, MemoryPolicy, Micros, TenantId,
        broker::{Activity, Command, Event, Order, Terms},
        ledger::{Holding, Share},
    };

    const GIB: u64 = 1 << 30;
    const NOW: Micros = Micros::ZERO;

    /// Processes with so much movable memory on devices of 80 GiB, and so much host memory that is kept.
    fn broker(limit: u64, processes: &[(u8, u64, u64)]) -> Broker {
        let mut broker = Broker::new(limit);
        for device in 0..3u8 {
            broker.handle(
                NOW,
                Event::Device {
                    uuid: device.to_string(),
                    capacity: 80 * GIB,
                    used: 0,
                },
            );
        }
        for (n, (device, movable, kept)) in processes.iter().enumerate() {
            let (tenant, process) = (TenantId(n as u64), ProcessId(n as u64));
            let terms = Terms {
                class: Class::Standard,
                share: Share {
                    guaranteed: 0,
                    limit: u64::MAX,
                },
                policy: MemoryPolicy::SwapOthers,
                sleep_after: None,
            };
            broker.handle(NOW, Event::Tenant(tenant, terms));
            broker.handle(NOW, Event::Joined(process, tenant));
            broker.host.set(process.0, *kept);
            broker.handle(NOW, Event::Keeps(process, *kept));
            broker.handle(
                NOW,
                Event::Holds {
                    process,
                    device: device.to_string(),
                    total: 80 * GIB,
                    holding: Holding {
                        movable: *movable,
                        pinned: 0,
                        swapped: 0,
                    },
                },
            );
        }
        broker
    }

    fn gib(broker: &Broker) -> Vec<u64> {
        broker.ahead().values().map(|it| it / GIB).collect()
    }

    #[test]
    fn processes_have_made_what_they_could_move() {
        let (least, most) = (1, HOST_PIECE - 1);
        let processes = [
            (0, 30 * GIB + least, 0),
            (1, 20 * GIB, 5 * GIB),
            (1, most, 0),
        ];
        let broker = broker(u64::MAX, &processes);
        assert_eq!(gib(&broker), [30, 15, 0]);
        let made: Vec<u64> = broker.ahead().into_values().collect();
        assert_eq!(made, [30 * GIB + HOST_PIECE, 15 * GIB, 0]);
    }

    #[test]
    fn limit_serves_short_devices_first() {
        let processes = [(0, 40 * GIB, 0), (1, 30 * GIB, 0), (1, 38 * GIB, 4 * GIB)];
        assert_eq!(gib(&broker(64 * GIB, &processes)), [0, 26, 34]);
        assert_eq!(gib(&broker(80 * GIB, &processes)), [12, 30, 34]);
    }

    #[test]
    fn tenants_that_move_or_cannot_move_are_left_out() {
        let mut broker = broker(u64::MAX, &[(0, 30 * GIB, 0), (0, 10 * GIB, 0)]);
        let commands = broker.handle(NOW, Event::Sleep(TenantId(0), 1));
        let closes = |it: &Command| matches!(it, Command::Order(_, _, Order::Quiesce { .. }));
        assert!(commands.iter().any(closes));
        assert_eq!(broker.ahead(), BTreeMap::from([(ProcessId(1), 10 * GIB)]));
        let activity = Activity {
            in_group: true,
            ..Activity::default()
        };
        broker.handle(NOW, Event::Activity(vec![(TenantId(1), activity)]));
        assert_eq!(gib(&broker), [0]);
    }

    proptest! {
        /// What is made ahead exceeds neither the limit, with what is kept, nor what a process could move.
        #[test]
        fn ahead_is_bounded(
            limit in 0..1000 * GIB,
            processes in proptest::collection::vec((0..3u8, 0..60 * GIB, 0..20 * GIB), 0..8),
        ) {
            let broker = broker(limit, &processes);
            let ahead = broker.ahead();
            let (kept, _) = broker.on_host();
            let sum: u64 = ahead.values().sum();
            prop_assert!(sum == 0 || sum + kept <= limit);
            for (id, bytes) in &ahead {
                let (_, movable, kept) = processes[id.0 as usize];
                prop_assert!(*bytes < movable.saturating_sub(kept).max(1) + HOST_PIECE);
                prop_assert_eq!(bytes % HOST_PIECE, 0);
                if limit >= 650 * GIB {
                    prop_assert!(movable.saturating_sub(kept).saturating_sub(*bytes) < HOST_PIECE);
                }
            }
        }
    }
}
