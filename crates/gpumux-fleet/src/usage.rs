//! Tenants whose use of GPUs was recorded: how many GPUs they need together, and what they receive there.
//!
//! The first half of a recording is known to the planner: guarantees and places follow from it. The second half is
//! played on these places, window by window.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{
    fleet::{Fleet, Place},
    model::{Class, Demand, NodeSpec, WHOLE},
    rules::Rule,
    serving::{Error, Profile, Service, Terms},
    sizing::{Chooser, Sharing},
};

/// What a tenant did in one window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// GPU time that it used, in thousandths of a GPU.
    pub milli: u32,
    /// Memory, in MiB.
    pub memory_mib: u32,
}

/// Tenants by name, and their samples by window.
pub type Recording = BTreeMap<String, BTreeMap<u32, Sample>>;

/// One row of a recording.
#[derive(Clone, Debug, Deserialize)]
pub struct Row {
    /// Its name.
    pub tenant: String,
    /// Number of the window.
    pub window: u32,
    /// See [`Sample`].
    pub gpu_milli: u32,
    /// See [`Sample`].
    pub memory_mib: u32,
}

/// The rows as a recording; of two rows of one window the last counts.
pub fn recording(rows: impl IntoIterator<Item = Row>) -> Recording {
    let mut found = Recording::new();
    for row in rows {
        let sample = Sample {
            milli: row.gpu_milli,
            memory_mib: row.memory_mib,
        };
        found
            .entry(row.tenant)
            .or_default()
            .insert(row.window, sample);
    }
    found
}

/// A request to a service.
#[derive(Clone, Debug, Deserialize)]
pub struct Request {
    /// The service's name.
    pub name: String,
    /// When it came, in seconds.
    pub at_s: f64,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens of the answer.
    pub output_tokens: u32,
}

/// The use that requests make of whole GPUs, in windows of so many seconds. A request costs its part of the largest batch
/// that keeps the latency objective, and its tokens stay in memory during the window.
///
/// # Errors
/// The profile does not know a service's model, or no GPUs suffice.
pub fn of_requests(
    requests: &[Request],
    services: &[Service],
    profile: &Profile,
    terms: &Terms,
    window_s: f64,
) -> Result<Recording, Error> {
    let last = requests.iter().map(|it| it.at_s).fold(0.0, f64::max);
    let windows = (last / window_s) as u32 + 1;
    let mut found = Recording::new();
    for service in services {
        let weights = service.weights_mib + terms.working_mib;
        let mut sums = vec![(0.0, 0u64); windows as usize];
        for request in requests.iter().filter(|it| it.name == service.name) {
            let alike = Service {
                prompt_tokens: request.prompt_tokens,
                output_tokens: request.output_tokens.max(1),
                ..service.clone()
            };
            let sum = &mut sums[(request.at_s / window_s) as usize];
            sum.0 += profile.each_ms(&alike, terms)?;
            sum.1 += u64::from(request.prompt_tokens + request.output_tokens);
        }
        let sample = |(ms, tokens): (f64, u64)| Sample {
            milli: (ms / window_s).ceil() as u32,
            memory_mib: weights + (tokens * u64::from(service.kv_bytes)).div_ceil(1 << 20) as u32,
        };
        let samples = (0..).zip(sums.into_iter().map(sample)).collect();
        found.insert(service.name.clone(), samples);
    }
    Ok(found)
}

/// A way of sharing GPUs while tenants use more and less of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// A GPU for each tenant.
    Dedicated,
    /// The driver's time slicing between so many tenants of a GPU: equal turns for those that are busy, memory as long
    /// as it lasts.
    TimeSliced(u32),
    /// MPS as the device plugin sets it: each of so many tenants has that part of the SMs and of the memory at most.
    Mps(u32),
    /// Guarantees that are caps, placed by a rule.
    Caps(Rule),
    /// Guarantees; what others leave idle is shared, also memory above the guarantee.
    Gpumux,
    /// No guarantees: tenants are placed by mean use of time and memory, and memory of one that is idle in a window is on
    /// the host. On as few GPUs as served the first half.
    GpumuxSwapped,
}

impl Way {
    /// All that are compared.
    pub const ALL: [Self; 11] = [
        Self::Dedicated,
        Self::TimeSliced(2),
        Self::TimeSliced(4),
        Self::Mps(2),
        Self::Mps(4),
        Self::Caps(Rule::Random),
        Self::Caps(Rule::BestFit),
        Self::Caps(Rule::GpuPacking),
        Self::Caps(Rule::Fgd),
        Self::Gpumux,
        Self::GpumuxSwapped,
    ];

    /// Its name.
    pub fn name(self) -> String {
        match self {
            Self::Dedicated => "dedicated".to_owned(),
            Self::TimeSliced(replicas) => format!("time-sliced-{replicas}"),
            Self::Mps(replicas) => format!("mps-{replicas}"),
            Self::Caps(rule) => rule.name().to_owned(),
            Self::Gpumux => "gpumux".to_owned(),
            Self::GpumuxSwapped => "gpumux-swapped".to_owned(),
        }
    }
}

/// What is the same for all ways.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// Memory of a GPU, in MiB.
    pub card_mib: u32,
    /// A guarantee covers so many percent of the windows of the first half.
    pub covers_percent: u32,
    /// Length of a window, in seconds.
    pub window_s: f64,
    /// Memory that moves between GPU and host, in MiB per second.
    pub moved_mib_s: f64,
}

/// Windows of the first half that [`Way::GpumuxSwapped`] must serve, in percent.
const SERVED_PERCENT: f64 = 99.0;

/// What a way of sharing yields.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Outcome {
    /// Number of GPUs.
    pub gpus: usize,
    /// Of the windows in which a tenant used its GPU: percent in which it would have received as much.
    pub attained: f64,
    /// Of the GPU time that they used: percent that they would have received in the same window.
    pub received: f64,
    /// Of the windows in which a tenant used its GPU: percent in which its memory would not have fitted.
    pub out_of_memory: f64,
}

/// A tenant as the planner knows it.
struct Known<'a> {
    /// Its guarantee.
    milli: u32,
    /// The larger part of a GPU, of its time or its memory, that it uses in the mean, to the next percent.
    mean_milli: u32,
    /// The most memory that it had.
    memory_mib: u32,
    samples: &'a BTreeMap<u32, Sample>,
}

/// Tenants that are part of the comparison: those with samples in both halves. None without any.
fn known<'a>(recording: &'a Recording, setting: &Setting) -> Option<(u32, Vec<Known<'a>>)> {
    let windows = || recording.values().flat_map(BTreeMap::keys).copied();
    let middle = windows().min()?.midpoint(windows().max()? + 1);
    let tenant = |samples: &'a BTreeMap<u32, Sample>| {
        samples.range(middle..).next()?;
        let before = || samples.range(..middle).map(|(_, sample)| *sample);
        let mut used: Vec<u32> = before().map(|sample| sample.milli).collect();
        used.sort_unstable();
        let nth = (used.len() * setting.covers_percent as usize).div_ceil(100);
        let covered = *used.get(nth.max(1) - 1)?;
        let busy = |sample: &Sample| sample.milli > 0;
        let held: u64 = before()
            .filter(busy)
            .map(|sample| u64::from(sample.memory_mib))
            .sum();
        let held = held * u64::from(WHOLE) / u64::from(setting.card_mib.max(1));
        let mean = used
            .iter()
            .map(|used| u64::from(*used))
            .sum::<u64>()
            .max(held)
            / used.len() as u64;
        let percent = |milli: u32| (milli.div_ceil(10) * 10).clamp(10, WHOLE);
        Some(Known {
            milli: percent(covered),
            mean_milli: percent(u32::try_from(mean).unwrap_or(WHOLE)),
            memory_mib: before().map(|sample| sample.memory_mib).max()?,
            samples,
        })
    };
    Some((middle, recording.values().filter_map(tenant).collect()))
}

/// How many tenants of a recording are compared, and the mean number of GPUs that they use in the second half.
pub fn compared(recording: &Recording, setting: &Setting) -> (usize, f64) {
    let Some((middle, tenants)) = known(recording, setting) else {
        return (0, 0.0);
    };
    let later = || tenants.iter().flat_map(|it| it.samples.range(middle..));
    let windows: std::collections::BTreeSet<u32> = later().map(|(window, _)| *window).collect();
    let used: f64 = later().map(|(_, sample)| f64::from(sample.milli)).sum();
    (
        tenants.len(),
        used / f64::from(WHOLE) / windows.len().max(1) as f64,
    )
}

/// Plans by the first half, and plays the second. None if no tenant is in both halves, or one needs more than a GPU has.
pub fn play(recording: &Recording, way: Way, setting: &Setting) -> Option<Outcome> {
    let (middle, tenants) = known(recording, setting)?;
    if tenants.is_empty() {
        return None;
    }
    let count = tenants.len();
    let gpus: Vec<Vec<usize>> = match way {
        Way::Dedicated => (0..count).map(|nth| vec![nth]).collect(),
        Way::TimeSliced(replicas) | Way::Mps(replicas) => {
            let gpus = count.div_ceil(replicas as usize);
            (0..gpus)
                .map(|gpu| (gpu..count).step_by(gpus).collect())
                .collect()
        }
        Way::Caps(rule) => packed(&tenants, Sharing::Fractions(rule), setting)?,
        Way::Gpumux => packed(&tenants, Sharing::Guaranteed, setting)?,
        Way::GpumuxSwapped => {
            let enough = |gpus: &Vec<Vec<usize>>| {
                let learned = halves(&tenants, gpus, way, setting, 0, middle);
                learned.attained >= SERVED_PERCENT
            };
            let plans = (1..=count).filter_map(|gpus| spread(&tenants, gpus, setting));
            plans.into_iter().find(enough)?
        }
    };
    Some(halves(&tenants, &gpus, way, setting, middle, u32::MAX))
}

fn nodes(count: usize, setting: &Setting) -> Vec<NodeSpec> {
    let node = |nth| NodeSpec {
        name: format!("gpu-{nth}"),
        cpu_milli: 0,
        memory_mib: 0,
        gpus: 1,
        model: 0,
        gpu_memory_mib: setting.card_mib,
        domain: 0,
    };
    (0..count).map(node).collect()
}

fn demand(tenant: &Known<'_>, class: Class) -> Demand {
    Demand {
        gpus: 1,
        milli: match class {
            Class::Guaranteed => tenant.milli,
            Class::Preemptible => tenant.mean_milli,
        },
        gpu_memory_mib: tenant.memory_mib,
        class,
        ..Demand::default()
    }
}

/// The tenants of each GPU, on as few GPUs as the guarantees need.
fn packed(tenants: &[Known<'_>], sharing: Sharing, setting: &Setting) -> Option<Vec<Vec<usize>>> {
    let mut order: Vec<usize> = (0..tenants.len()).collect();
    order.sort_by_key(|nth| std::cmp::Reverse((tenants[*nth].milli, tenants[*nth].memory_mib)));
    (1..=tenants.len()).find_map(|gpus| {
        let specs = nodes(gpus, setting);
        let workload: Vec<Demand> = (order.iter())
            .map(|nth| demand(&tenants[*nth], Class::Guaranteed))
            .collect();
        placed(&specs, &order, &workload, sharing)
    })
}

/// The tenants of each of so many GPUs, spread by the engine. None if they do not fit.
fn spread(tenants: &[Known<'_>], gpus: usize, setting: &Setting) -> Option<Vec<Vec<usize>>> {
    let order: Vec<usize> = (0..tenants.len()).collect();
    let workload: Vec<Demand> = (tenants.iter())
        .map(|tenant| demand(tenant, Class::Preemptible))
        .collect();
    placed(&nodes(gpus, setting), &order, &workload, Sharing::Elastic)
}

fn placed(
    specs: &[NodeSpec],
    order: &[usize],
    workload: &[Demand],
    sharing: Sharing,
) -> Option<Vec<Vec<usize>>> {
    let mut chooser = Chooser::new(specs, workload, sharing);
    let mut fleet = Fleet::new(specs.to_vec());
    let mut found = vec![Vec::new(); specs.len()];
    for (nth, demand) in order.iter().zip(workload) {
        let Place { node, gpus } = chooser.place(&fleet, demand)?;
        fleet
            .place(*nth as u64, *demand, Place { node, gpus })
            .ok()?;
        found[node as usize].push(*nth);
    }
    Some(found)
}

/// Plays the windows from `first` up to `end`.
fn halves(
    tenants: &[Known<'_>],
    gpus: &[Vec<usize>],
    way: Way,
    setting: &Setting,
    first: u32,
    end: u32,
) -> Outcome {
    let (mut windows, mut attained, mut short, mut used, mut received) =
        (0u32, 0u32, 0u32, 0.0, 0.0);
    for here in gpus {
        let all = || here.iter().map(|nth| &tenants[*nth]);
        let times: std::collections::BTreeSet<u32> = all()
            .flat_map(|tenant| tenant.samples.range(first..end).map(|(at, _)| *at))
            .collect();
        for at in times {
            let present = || all().filter_map(|tenant| Some((tenant, tenant.samples.get(&at)?)));
            let wanted: Vec<Wanted> = present()
                .map(|(tenant, sample)| {
                    let idle = at
                        .checked_sub(1)
                        .and_then(|before| tenant.samples.get(&before));
                    let slept = idle.is_none_or(|before| before.milli == 0);
                    let back = match way {
                        Way::GpumuxSwapped if slept && sample.milli > 0 => {
                            f64::from(sample.memory_mib) / setting.moved_mib_s / setting.window_s
                        }
                        _ => 0.0,
                    };
                    Wanted {
                        milli: sample.milli.min(WHOLE) + (back * f64::from(WHOLE)).ceil() as u32,
                        memory_mib: sample.memory_mib,
                        share: tenant.milli,
                        guaranteed_mib: tenant.memory_mib,
                    }
                })
                .collect();
            let fits = in_memory(&wanted, way, setting.card_mib);
            let given = given(&wanted, &fits, way);
            for (((_, sample), wanted), (fits, given)) in
                present().zip(&wanted).zip(fits.iter().zip(given))
            {
                if sample.milli == 0 {
                    continue;
                }
                windows += 1;
                short += u32::from(!fits);
                attained += u32::from(given >= wanted.milli && sample.milli <= WHOLE);
                used += f64::from(sample.milli);
                received += f64::from(given.min(sample.milli));
            }
        }
    }
    let percent = |part: f64, whole: f64| {
        if whole > 0.0 {
            part * 100.0 / whole
        } else {
            100.0
        }
    };
    Outcome {
        gpus: gpus.len(),
        attained: percent(f64::from(attained), f64::from(windows)),
        received: percent(received, used),
        out_of_memory: percent(f64::from(short), f64::from(windows).max(1.0)),
    }
}

/// A tenant of a GPU in one window.
struct Wanted {
    milli: u32,
    memory_mib: u32,
    share: u32,
    guaranteed_mib: u32,
}

/// Which tenants have their memory.
fn in_memory(wanted: &[Wanted], way: Way, card_mib: u32) -> Vec<bool> {
    // Those for whom `first` holds come first; then each that finds enough left.
    let in_turn = |first: &dyn Fn(&Wanted) -> bool| {
        let mut left = u64::from(card_mib);
        let mut fits = vec![false; wanted.len()];
        for (nth, it) in (wanted.iter().enumerate().filter(|(_, it)| first(it)))
            .chain(wanted.iter().enumerate().filter(|(_, it)| !first(it)))
        {
            if u64::from(it.memory_mib) <= left {
                left -= u64::from(it.memory_mib);
                fits[nth] = true;
            }
        }
        fits
    };
    match way {
        Way::Dedicated | Way::TimeSliced(_) => in_turn(&|_| true),
        Way::Mps(replicas) => {
            let fits = |it: &Wanted| it.memory_mib <= card_mib / replicas;
            wanted.iter().map(fits).collect()
        }
        Way::Caps(_) => {
            let fits = |it: &Wanted| it.memory_mib <= it.guaranteed_mib;
            wanted.iter().map(fits).collect()
        }
        Way::Gpumux => in_turn(&|it| it.memory_mib <= it.guaranteed_mib),
        Way::GpumuxSwapped => {
            let busy = in_turn(&|it| it.milli > 0);
            wanted
                .iter()
                .zip(busy)
                .map(|(it, fits)| fits || it.milli == 0)
                .collect()
        }
    }
}

/// What each tenant receives, in thousandths of the GPU.
fn given(wanted: &[Wanted], fits: &[bool], way: Way) -> Vec<u32> {
    let asked: Vec<u32> = (wanted.iter().zip(fits))
        .map(|(it, fits)| if *fits { it.milli } else { 0 })
        .collect();
    let capped = |cap: &dyn Fn(&Wanted) -> u32| {
        let each = asked
            .iter()
            .zip(wanted)
            .map(|(asked, it)| (*asked).min(cap(it)));
        each.collect::<Vec<u32>>()
    };
    match way {
        Way::Dedicated | Way::TimeSliced(_) | Way::GpumuxSwapped => {
            fair(&asked, &vec![0; asked.len()])
        }
        Way::Mps(replicas) => capped(&|_| WHOLE / replicas),
        Way::Caps(_) => capped(&|it| it.share),
        Way::Gpumux => fair(&asked, &capped(&|it| it.share)),
    }
}

/// What each tenant gets: first its part of `first`, then what is left in equal parts for those that ask for more.
fn fair(asked: &[u32], first: &[u32]) -> Vec<u32> {
    let mut given = first.to_vec();
    loop {
        let left = WHOLE.saturating_sub(given.iter().sum());
        let open: Vec<usize> = (0..asked.len())
            .filter(|nth| given[*nth] < asked[*nth])
            .collect();
        let each = left.checked_div(open.len() as u32).unwrap_or(0);
        if each == 0 {
            return given;
        }
        for nth in open {
            given[nth] += each.min(asked[nth] - given[nth]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fair_gives_equal_parts_of_what_is_left() {
        assert_eq!(fair(&[100, 900, 900], &[0, 0, 0]), [100, 450, 450]);
        assert_eq!(fair(&[800, 600], &[700, 0]), [800, 200]);
        assert_eq!(fair(&[], &[]), [0; 0]);
    }
}
