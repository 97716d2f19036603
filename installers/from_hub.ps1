<#
Installs or upgrades echo-node on Windows for the current user, and joins the hub that serves this script:
    & ([scriptblock]::Create((irm HUB/install.ps1))) -Join HUB [-Token TOKEN] [-Service]
You install a program that this hub's operator built, so only do this if you trust the operator. The script checks the
program against the hashes below before it runs any part of it. Later the hub only sends numbers and model files; none
of them is executed. The same command upgrades.
#>
param(
    [string] $Join = '',
    [string] $Token = '',
    [string] $Python = '',
    [switch] $Insecure,
    [switch] $Service
)
Set-StrictMode -Version 3.0
$ErrorActionPreference = 'Stop'

$Archives = @'
@ARCHIVES@
'@

$Wheelhouse = @'
@WHEELHOUSE@
'@

function Find-Python {
    $candidates = @(, @('py', '-3.13')) + @(, @('py', '-3.12')) + @(, @('py', '-3.11')) + @(, @('python'))
    if ($Python) { $candidates = @(, @($Python)) }
    foreach ($candidate in $candidates) {
        if (-not (Get-Command $candidate[0] -ErrorAction SilentlyContinue)) { continue }
        # The Store's stand-in for python.exe writes to stderr, which must not stop this script.
        $ErrorActionPreference = 'Continue'
        & $candidate[0] @($candidate | Select-Object -Skip 1) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>$null | Out-Null
        if ($LASTEXITCODE -eq 0) { return , $candidate }
    }
    throw 'Python 3.11 or newer is needed. For example: winget install Python.Python.3.13'
}

function Install-FromHub {
    if (-not $Join) { throw 'The hub''s address is missing: & ([scriptblock]::Create((irm HUB/install.ps1))) -Join HUB' }
    $hub = $Join.TrimEnd('/')
    $found = Find-Python
    $scratch = Join-Path ([IO.Path]::GetTempPath()) ([IO.Path]::GetRandomFileName())
    New-Item -ItemType Directory -Path $scratch | Out-Null
    try {
        $opener = Join-Path $scratch 'wheelhouse.py'
        [IO.File]::WriteAllText($opener, $Wheelhouse)
        $run = @($found | Select-Object -Skip 1) + @($opener)
        $platform = & $found[0] @run platform
        $line = $Archives -split '\r?\n' | Where-Object { $_.StartsWith("$platform ") } | Select-Object -First 1
        if (-not $line) { throw "This hub offers no installation for $platform. Install from the source, then: echo-node join $hub" }
        $sha256, $name = ($line -split ' ')[1, 2]
        Write-Host "Fetching $name from $hub"
        $options = @('open', "$hub/install/$sha256/$name", $scratch, '--sha256', $sha256)
        if ($Insecure) { $options += '--insecure' }
        $opened = & $found[0] @run @options
        if ($LASTEXITCODE -ne 0) { throw 'Nothing is installed; see above.' }
        $script = Join-Path $opened 'installers\windows\install.ps1'
        $arguments = @('-From', $opened, '-Temporary', $scratch, '-Join', $Join)
        if ($Token) { $arguments += @('-Token', $Token) }
        if ($Python) { $arguments += @('-Python', $Python) }
        if ($Insecure) { $arguments += '-Insecure' }
        if ($Service) { $arguments += '-Service' }
        # In a separate process, so that its execution policy applies to nothing else.
        powershell -NoProfile -ExecutionPolicy Bypass -File $script @arguments
        if ($LASTEXITCODE -ne 0) { throw "The installer ended with exit code $LASTEXITCODE." }
    }
    finally { if (Test-Path -LiteralPath $scratch) { Remove-Item -LiteralPath $scratch -Recurse -Force } }
}

Install-FromHub # On the last line, so that an incomplete download runs nothing.
