//! The tables of `gpumux ps`, made of what the daemon answered.

use std::{
    collections::BTreeMap,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use gpumux_core::{
    quantity::{Percent, Size, Time},
    runlist::Mechanism,
    space::Way,
};
use gpumux_daemon::api::types::{
    Copying, Device, Domain, Ended, Fault, MemoryShare, Placement, Tenant,
};

use crate::output::{self, cut, percent, short};

/// Longest name and user in a table that is fitted to a terminal.
const NAME: usize = 16;
const USER: usize = 8;
/// Fewer columns than that are too few for a command.
const COMMAND: usize = 16;

/// Order of the rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Sort {
    #[default]
    Age,
    Name,
    User,
    Class,
    State,
    Share,
    Guaranteed,
    Wait,
    Memory,
}

/// The part of its time with work that it waited.
fn waited(tenant: &Tenant) -> Option<f64> {
    let sum = |field: fn(&Domain) -> u64| tenant.domains.iter().map(field).sum::<u64>();
    let (runnable, waited) = (sum(|d| d.runnable_us), sum(|d| d.waited_us));
    (runnable > 0).then(|| waited as f64 / runnable as f64)
}

fn in_use(tenant: &Tenant) -> u64 {
    tenant.memory.iter().map(|share| share.in_use).sum()
}

/// Orders tenants; what is measured, the most first.
pub(super) fn sort(tenants: &mut [Tenant], by: Sort) {
    let shares = |tenant: &Tenant| -> f64 {
        let devices = tenant.devices.iter();
        devices.map(|device| tenant.received(device)).sum()
    };
    let down = |a: f64, b: f64| b.total_cmp(&a);
    let wait = |tenant: &Tenant| waited(tenant).unwrap_or_default();
    tenants.sort_by(|a, b| match by {
        Sort::Age => a.since.cmp(&b.since),
        Sort::Name => a.name.cmp(&b.name),
        Sort::User => a.uid.cmp(&b.uid),
        Sort::Class => a.class.cmp(&b.class),
        Sort::State => a.state.cmp(&b.state),
        Sort::Share => down(shares(a), shares(b)),
        Sort::Guaranteed => down(a.guaranteed(), b.guaranteed()),
        Sort::Wait => down(wait(a), wait(b)),
        Sort::Memory => in_use(b).cmp(&in_use(a)),
    });
}

/// What people call a device.
pub(super) fn index(uuid: &str, devices: &[Device]) -> String {
    Device::number(uuid, devices).unwrap_or_else(|| short(uuid).to_owned())
}

/// One row for each tenant, fitted to a terminal of so many columns, or whole.
pub(super) fn narrow(tenants: &[Tenant], devices: &[Device], columns: Option<usize>) -> String {
    let mut rows = output::head("NAME|USER|CLASS|STATE|GPU|SHARE|GUARANTEED|WAIT|MEMORY|COMMAND");
    rows.extend(tenants.iter().map(|tenant| row(tenant, devices)));
    fit(rows, columns, &[(0, NAME), (1, USER)])
}

fn row(tenant: &Tenant, devices: &[Device]) -> Vec<String> {
    let mut gpus: Vec<String> = tenant.devices.iter().map(|it| index(it, devices)).collect();
    gpus.sort_by_key(|gpu| (gpu.len(), gpu.clone()));
    let shares: Vec<f64> = (tenant.devices.iter())
        .map(|device| tenant.received(device))
        .collect();
    let least = shares.iter().copied().reduce(f64::min);
    let most = shares.iter().copied().reduce(f64::max);
    let share = match least
        .zip(most)
        .map(|(least, most)| (percent(least), percent(most)))
    {
        None => "-".into(),
        Some((least, most)) if least == most => most,
        Some((least, most)) => format!("{}-{most}", least.trim_end_matches('%')),
    };
    let swapped: u64 = tenant.memory.iter().map(|share| share.swapped).sum();
    let memory = match (in_use(tenant), swapped) {
        (0, 0) => "-".into(),
        (here, 0) => output::bytes(here),
        (here, away) => format!("{}+{}", output::bytes(here), output::bytes(away)),
    };
    vec![
        tenant.name.clone(),
        tenant.user.clone(),
        tenant.class.to_string(),
        tenant.state.to_string(),
        match gpus.is_empty() {
            true => "-".into(),
            false => gpus.join(","),
        },
        share,
        guarantee(tenant.guaranteed()),
        waited(tenant).map_or_else(|| "-".into(), percent),
        memory,
        tenant.command.clone(),
    ]
}

/// Columns in so wide a terminal: one space apart where two leave too little for the last, which is cut.
fn fit(mut rows: Vec<Vec<String>>, columns: Option<usize>, longest: &[(usize, usize)]) -> String {
    let Some(columns) = columns else {
        return output::table(&rows);
    };
    for row in rows.iter_mut().skip(1) {
        for (column, most) in longest {
            row[*column] = cut(&row[*column], *most);
        }
    }
    let last = rows.first().map_or(0, Vec::len).saturating_sub(1);
    let taken: usize = output::widths(&rows).iter().take(last).sum();
    let gap = if taken + 2 * last + COMMAND <= columns {
        2
    } else {
        1
    };
    let text = output::columns(&rows, gap);
    text.lines().map(|line| cut(line, columns) + "\n").collect()
}

/// One row for each tenant and GPU, with everything.
pub(super) fn wide(tenants: &[Tenant], devices: &[Device], now: SystemTime) -> String {
    let mut rows = output::head(
        "NAME|USER|CLASS|STATE|GPU|SHARE|ENTITLED|GUARANTEED|LIMIT|WEIGHT|WAIT|TIMESLICE|COPIES|SHARING|MEMORY|MEM LIMIT|SWAPPED|PIDS|AGE|COMMAND",
    );
    for tenant in tenants {
        let used = tenant.devices.iter().map(Some);
        let none = tenant.devices.is_empty().then_some(None);
        for (n, device) in used.chain(none).enumerate() {
            let own = |text: String| if n == 0 { text } else { String::new() };
            let mut row = vec![
                own(tenant.name.clone()),
                own(tenant.user.clone()),
                own(tenant.class.to_string()),
                own(tenant.state.to_string()),
            ];
            let domains = |device: &String| {
                let all = tenant.domains.iter();
                all.filter(|it| it.device == *device).collect::<Vec<_>>()
            };
            let entitled = device.map(|device| {
                let shares = domains(device).into_iter().map(|it| it.entitled_share);
                shares.fold(0.0, f64::max)
            });
            let dash = || "-".to_owned();
            row.push(device.map_or_else(dash, |device| index(device, devices)));
            row.push(device.map_or_else(dash, |device| percent(tenant.received(device))));
            row.push(entitled.map_or_else(dash, percent));
            row.push(guarantee(tenant.guaranteed()));
            row.push(percent(tenant.spec.limit));
            row.push(tenant.spec.weight.to_string());
            row.push(waited(tenant).map_or_else(dash, percent));
            row.push(device.map_or_else(dash, |device| slices(&domains(device))));
            row.push(device.map_or_else(dash, |device| copies(tenant, device)));
            row.push(sharing(&tenant.placement));
            let memory = tenant.memory.iter().find(|it| Some(&it.device) == device);
            row.extend(memory.map_or_else(|| vec![dash(); 3], memory_columns));
            row.push(own(join(&tenant.pids)));
            row.push(own(age(tenant.since, now)));
            row.push(own(tenant.command.clone()));
            rows.push(row);
        }
    }
    output::table(&rows)
}

/// Those that have ended, the latest first.
pub(super) fn ended(ends: &[Ended], now: SystemTime, columns: Option<usize>) -> String {
    let mut rows = output::head("ENDED|USER|CLASS|EXIT|AGO|RAN|REASON");
    rows.extend(ends.iter().rev().map(|end| {
        let exit = match (end.exit.code, end.exit.signal) {
            (Some(code), _) => code.to_string(),
            (_, Some(signal)) => crate::signals::name(signal),
            (None, None) => "-".into(),
        };
        let ran = Duration::from_secs(end.at.saturating_sub(end.since));
        vec![
            end.name.clone(),
            end.user.clone(),
            end.class.clone(),
            exit,
            age(end.at, now),
            Time(ran).to_string(),
            end.reason.clone(),
        ]
    }));
    fit(rows, columns, &[(0, NAME), (1, USER)])
}

fn guarantee(share: f64) -> String {
    match share > 0.0 {
        true => Percent(share).to_string(),
        false => "-".into(),
    }
}

fn slices(domains: &[&Domain]) -> String {
    let mut all: Vec<String> = (domains.iter())
        .map(|domain| match domain.frozen {
            true => "frozen".to_owned(),
            false => Time(Duration::from_micros(domain.timeslice_us)).to_string(),
        })
        .collect();
    all.sort();
    all.dedup();
    all.join(",")
}

/// Bytes a second to the device and to the host, with a star where they are limited.
fn copies(tenant: &Tenant, device: &str) -> String {
    let one = |copying: Copying| {
        let star = if copying.limit.is_some() { "*" } else { "" };
        format!("{}/s{star}", output::bytes(copying.rate))
    };
    match tenant.copies(device) {
        ways if ways.iter().all(|it| it.rate == 0) => "-".into(),
        [to_device, to_host] => format!("{} in, {} out", one(to_device), one(to_host)),
    }
}

fn sharing(placement: &Placement) -> String {
    match (placement.way, &placement.trust, placement.sm_percent) {
        (Way::Space, Some(trust), Some(percent)) => format!("space {trust} {percent}%"),
        (Way::Space, Some(trust), None) => format!("space {trust}"),
        (Way::Time | Way::Space, _, _) => "time".into(),
    }
}

/// A line about a guarantee that does not hold now, if it does not.
pub(super) fn hindered(tenant: &Tenant, all: &[Tenant]) -> String {
    if tenant.lapsed {
        return format!(
            "{}: its guarantees have lapsed, as it had no work for long; they hold again when it has work, if they fit then\n",
            tenant.name
        );
    }
    let by = tenant.hindered_by(all);
    match by.is_empty() {
        true => String::new(),
        false => format!(
            "{}: its guarantee of {} holds only once these start anew: {}\n",
            tenant.name,
            Percent(tenant.spec.guaranteed),
            by.join(", ")
        ),
    }
}

/// A line about each group of several tenants, which run together: each of them is listed with what all received.
pub(super) fn groups(tenants: &[Tenant]) -> String {
    let mut groups: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for tenant in tenants {
        if let Some(group) = tenant.group() {
            groups.entry(group).or_default().push(&tenant.name);
        }
    }
    let several = groups.into_iter().filter(|(_, names)| names.len() > 1);
    let line = |(group, names): (String, Vec<&str>)| {
        let names = names.join(", ");
        format!("group {group}: {names} run together; the SHARE of each is what all received\n")
    };
    several.map(line).collect()
}

/// A line about the tenants that are scheduled at launch, if there are some.
pub(super) fn at_launch(tenants: &[Tenant]) -> String {
    let is = |it: &&Tenant| {
        it.domains
            .iter()
            .any(|it| it.mechanism == Mechanism::Launches)
    };
    let all: Vec<&str> = tenants.iter().filter(is).map(|it| &*it.name).collect();
    match all.is_empty() {
        true => String::new(),
        false => format!(
            "scheduled at launch, without the driver's controls: {}\n",
            all.join(", ")
        ),
    }
}

/// A line about the processes on a device that gpumux does not control, if there are some.
pub(super) fn foreign(device: &Device, devices: &[Device]) -> String {
    let all: Vec<String> = device.foreign.iter().map(ToString::to_string).collect();
    match all.is_empty() {
        true => String::new(),
        false => format!(
            "on GPU {} without gpumux: {}\n",
            index(&device.uuid, devices),
            all.join(", ")
        ),
    }
}

/// A line about a fault in a group.
pub(super) fn told(fault: &Fault, now: SystemTime) -> String {
    let after = match fault.restarted_ms {
        Some(ms) => format!("new members start again since {ms} ms later"),
        None => "the group could not be started again".into(),
    };
    format!(
        "{} ago in {fault}; {after} ({})\n",
        age(fault.at, now),
        fault.evidence
    )
}

fn memory_columns(memory: &MemoryShare) -> Vec<String> {
    vec![
        Size(memory.in_use).to_string(),
        memory
            .limit
            .map_or_else(|| "-".to_owned(), |limit| Size(limit).to_string()),
        Size(memory.swapped).to_string(),
    ]
}

fn join(pids: &[u32]) -> String {
    let pids: Vec<String> = pids.iter().map(u32::to_string).collect();
    pids.join(",")
}

fn age(since: u64, now: SystemTime) -> String {
    let age = now.duration_since(UNIX_EPOCH + Duration::from_secs(since));
    match age.unwrap_or_default().as_secs() {
        seconds @ 0..60 => format!("{seconds}s"),
        seconds => Time(Duration::from_secs(seconds)).to_string(),
    }
}

#[cfg(test)]
mod tests {
    use gpumux_core::Class;
    use gpumux_daemon::api::types::{Exit, TenantSpec, TenantState};

    use super::*;

    fn tenant(name: &str, state: TenantState, device: &str, shares: &[f64]) -> Tenant {
        let domain = |share: &f64| Domain {
            device: device.into(),
            received_share: *share,
            runnable_us: 1_000_000,
            waited_us: 250_000,
            ..Domain::default()
        };
        Tenant {
            name: name.into(),
            user: "root".into(),
            class: Class::Standard,
            spec: TenantSpec {
                guaranteed: 0.5,
                ..TenantSpec::default()
            },
            state,
            devices: vec![device.into()],
            domains: shares.iter().map(domain).collect(),
            command: "python train.py --epochs 100 --data /data/imagenet".into(),
            memory: vec![MemoryShare {
                device: device.into(),
                tenant: name.into(),
                guaranteed: 0,
                limit: None,
                in_use: 15 << 29,
                above_guarantee: 0,
                pinned: 0,
                swapped: 0,
                above_limit: 0,
            }],
            ..Tenant::default()
        }
    }

    #[test]
    fn table_fits_the_terminal_whatever_the_names() {
        let long = "a-name-that-is-much-too-long-for-a-column";
        let tenants = [
            tenant("train", TenantState::Running, "GPU-0-x", &[0.25]),
            tenant(long, TenantState::Starting, "GPU-1-y", &[0.9]),
        ];
        for columns in [80, 120, 50, 20] {
            let text = narrow(&tenants, &[], Some(columns));
            let widest = text.lines().map(|line| line.chars().count()).max();
            assert!(widest <= Some(columns), "{columns}:\n{text}");
        }
        let text = narrow(&tenants[..1], &[], Some(80));
        let head = "NAME  USER CLASS    STATE   GPU   SHARE GUARANTEED WAIT MEMORY  COMMAND";
        assert_eq!(text.lines().next(), Some(head), "{text}");
        let row = text.lines().nth(1).unwrap();
        assert!(
            row.ends_with("25%   50%        25%  7.5 GiB python train.py…"),
            "{row}"
        );
        let mut script = tenants[0].clone();
        script.command = "sh -c 'a\nb'".into();
        let rows = narrow(&[script], &[], Some(120)).lines().count();
        assert_eq!(rows, 2, "a command is in one line");
        let whole = narrow(&tenants, &[], None);
        assert!(
            whole.contains(long) && whole.contains("/data/imagenet"),
            "{whole}"
        );
    }

    #[test]
    fn rows_are_sorted_with_most_first() {
        let all = |by| {
            let mut tenants = [
                tenant("b", TenantState::Running, "GPU-0", &[0.1]),
                tenant("a", TenantState::Idle, "GPU-0", &[0.9]),
            ];
            tenants[0].memory[0].in_use = 1 << 40;
            sort(&mut tenants, by);
            tenants.map(|tenant| tenant.name).concat()
        };
        assert_eq!(
            [all(Sort::Age), all(Sort::Name), all(Sort::Share)],
            ["ba", "ab", "ab"]
        );
        assert_eq!([all(Sort::State), all(Sort::Memory)], ["ab", "ba"]);
    }

    #[test]
    fn ended_tenants_have_exit_and_reason() {
        let end = |exit, reason: &str| Ended {
            name: "train".into(),
            uid: 7,
            user: "ada".into(),
            class: "batch".into(),
            command: String::new(),
            since: 100,
            at: 190,
            exit,
            reason: reason.into(),
            noteworthy: false,
            log: None,
        };
        let ends = [
            end(Exit::of_status(3 << 8), "failed with exit code 3"),
            end(Exit::of_status(9), "killed by SIGKILL"),
            end(Exit::default(), "ended"),
        ];
        let now = UNIX_EPOCH + Duration::from_secs(200);
        let text = ended(&ends, now, Some(80));
        let rows: Vec<&str> = text.lines().collect();
        assert_eq!(rows[1], "train  ada   batch  -        10s  1m30s  ended");
        assert_eq!(
            rows[2],
            "train  ada   batch  SIGKILL  10s  1m30s  killed by SIGKILL"
        );
        assert_eq!(
            rows[3],
            "train  ada   batch  3        10s  1m30s  failed with exit code 3"
        );
    }

    #[test]
    fn ages_and_uuids_are_short() {
        let now = UNIX_EPOCH + Duration::from_secs(100_000);
        assert_eq!(age(99_995, now), "5s");
        assert_eq!(age(99_000, now), "16m40s");
        assert_eq!(age(100_001, now), "0s", "the clock was set back");
        assert_eq!(short("GPU-5efc3a7e-70d7-750a"), "GPU-5efc3a7e");
    }
}
