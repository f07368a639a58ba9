//! What the ledger guarantees, for any order of requests.

use std::collections::BTreeMap;

use gpumux_core::{
    TenantId,
    ledger::{Denied, Holding, Kind, Ledger, Share},
};
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Op {
    Guarantee(u64, u64, u64),
    Ask(u64, u64, u64, bool),
    /// Gives back a part of what it has, in 256ths.
    Give(u64, u64),
    /// Moves all that can be moved to the host.
    Out(u64),
    In(u64),
    Forget(u64),
}

fn op() -> impl Strategy<Value = Op> {
    let tenant = 0..5u64;
    prop_oneof![
        (tenant.clone(), 0..60u64, 0..120u64).prop_map(|(t, g, l)| Op::Guarantee(t, g, g + l)),
        (tenant.clone(), 1..40u64, 0..80u64, any::<bool>())
            .prop_map(|(t, n, w, p)| Op::Ask(t, n, w, p)),
        (tenant.clone(), 0..257u64).prop_map(|(t, part)| Op::Give(t, part)),
        tenant.clone().prop_map(Op::Out),
        tenant.clone().prop_map(Op::In),
        tenant.prop_map(Op::Forget),
    ]
}

proptest! {
    #[test]
    fn nothing_is_handed_out_twice_and_every_guarantee_can_be_had(
        ops in proptest::collection::vec(op(), 1..120),
    ) {
        let mut ledger = Ledger::new(100);
        for op in ops {
            match op {
                Op::Guarantee(t, guaranteed, limit) => {
                    let held = ledger.entry(TenantId(t)).holding.all();
                    // A limit below what is held takes nothing away.
                    let limit = limit.max(held);
                    let _ = ledger.guarantee(TenantId(t), Share { guaranteed: guaranteed.min(limit), limit });
                }
                Op::Ask(t, need, want, pinned) => {
                    let kind = if pinned { Kind::Pinned } else { Kind::Movable };
                    let before = ledger.entry(TenantId(t));
                    match ledger.ask(TenantId(t), need, want, kind) {
                        Ok(given) => prop_assert!(given >= need && given <= want.max(need)),
                        Err(denied) => {
                            prop_assert_eq!(before, ledger.entry(TenantId(t)));
                            // A tenant within its guarantee is only ever denied what can be taken back.
                            let within = before.holding.all() + need <= before.share.guaranteed;
                            let never = matches!(denied, Denied::Never { .. } | Denied::Limit { .. });
                            prop_assert!(!(within && never), "{denied:?} {before:?}");
                        }
                    }
                }
                Op::Give(t, part) => {
                    let mut holding = ledger.entry(TenantId(t)).holding;
                    holding.movable -= holding.movable * part.min(256) / 256;
                    ledger.set(TenantId(t), holding);
                }
                Op::Out(t) => {
                    let holding = ledger.entry(TenantId(t)).holding;
                    let swapped = holding.swapped + holding.movable;
                    ledger.set(TenantId(t), Holding { movable: 0, swapped, ..holding });
                }
                Op::In(t) => {
                    let before = ledger.entry(TenantId(t)).holding;
                    if ledger.can_return(TenantId(t)).is_ok() {
                        let movable = before.movable + before.swapped;
                        ledger.set(TenantId(t), Holding { movable, swapped: 0, ..before });
                    }
                }
                Op::Forget(t) => ledger.forget(TenantId(t)),
            }
            prop_assert!(ledger.resident() <= ledger.usable());
            let entries: BTreeMap<_, _> = ledger.entries().collect();
            for entry in entries.values() {
                prop_assert!(entry.holding.all() <= entry.share.limit);
            }
            let entitled: u64 = entries
                .values()
                .map(|entry| entry.share.guaranteed.max(entry.holding.pinned))
                .sum();
            prop_assert!(entitled <= ledger.usable(), "guarantees could not be kept");
        }
    }
}
